"""Cross-entropy of the head on scored positions only, in chunks: no tensor of tokens x vocabulary.

Shape letters: S scored positions, D hidden, V vocabulary, C positions of one chunk.
"""

from functools import partial
from typing import Any

import mlx.core as mx

from pippin.engines.mlx.body import Head, scalar
from pippin.engines.mlx.elementwise import exp

CHUNK = 1 << 23  # bytes of logits that a CPU makes at a time
CACHED = 400_000  # bytes of them that it reads again and again: its nearest caches hold them


def head_loss(
    hidden_SD: mx.array, targets_S: mx.array, head: Head, *, head_trained: bool
) -> mx.array:
    """Summed cross-entropy in nats, a float32 scalar.

    Gradients go to the hidden states, and to the head's dense weight where it is trained. They are
    made in the forward, chunk by chunk, while the logits are there.
    """

    @mx.custom_function
    def summed(hidden: mx.array, *weights: mx.array) -> tuple[mx.array, ...]:
        return _chunks(hidden, targets_S, head, weights)

    @summed.vjp
    def backward(primals: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
        del primals
        return [grad * cotangents[0].astype(grad.dtype) for grad in outputs[1:]]

    weights = (head.weight,) if head_trained else ()
    outputs: Any = summed(hidden_SD, *weights)
    return outputs[0]


def plain_loss(hidden_SD: mx.array, targets_S: mx.array, head: Head) -> float:
    """The same number without gradients."""
    total = 0.0
    for start in range(0, len(targets_S), head.chunk):
        part = slice(start, start + head.chunk)
        total += scalar(logits_loss(head.logits(hidden_SD[part]), targets_S[part]))
    return total


def _chunks(
    hidden_SD: mx.array, targets_S: mx.array, head: Head, weights: tuple[mx.array, ...]
) -> tuple[mx.array, ...]:
    """The loss, the gradient of the hidden states, and that of the weight where it is given."""
    loss, grads, grad_VD = mx.array(0.0), [], None
    size = head.chunk if has_kernel() else min(head.chunk, max(16, CHUNK // (4 * head.vocab)))
    for start in range(0, len(targets_S), size):
        hidden_CD = hidden_SD[start : start + size]
        if grads:  # one chunk's logits at a time
            hidden_CD = mx.depends([hidden_CD], [grads[-1]])[0]
        target_C1 = targets_S[start : start + size, None]
        products_CV = head.products(hidden_CD)
        chunk_loss, d_CV = _chunk(products_CV, target_C1, head)
        loss = loss + chunk_loss
        grads.append(mx.vjp(head.products, [hidden_CD], [d_CV])[1][0])
        if weights:
            part_VD = (d_CV.T @ hidden_CD).astype(mx.float32)
            grad_VD = part_VD if grad_VD is None else grad_VD + part_VD
    extra = () if grad_VD is None else (grad_VD.astype(weights[0].dtype),)
    return (loss, mx.concatenate(grads), *extra)


def _chunk(products_CV: mx.array, target_C1: mx.array, head: Head) -> tuple[mx.array, mx.array]:
    """The chunk's summed loss and its gradient with respect to the products."""
    if has_kernel():
        return _chunk_by_kernel(products_CV, target_C1, head)
    rows = max(1, CACHED // (4 * head.vocab))
    loss, grads = mx.array(0.0), []
    for start in range(0, len(target_C1), rows):
        some_CV = products_CV[start : start + rows]
        if grads:  # one after the other
            some_CV = mx.depends([some_CV], [grads[-1]])[0]
        some_loss, d_CV = _rows(some_CV, target_C1[start : start + rows], head)
        loss = loss + some_loss
        grads.append(d_CV)
    return loss, mx.concatenate(grads)


def _rows(products_CV: mx.array, target_C1: mx.array, head: Head) -> tuple[mx.array, mx.array]:
    logits_CV = head.finish(products_CV)
    top_C1 = logits_CV.max(axis=1, keepdims=True)
    powers_CV = exp(logits_CV - top_C1)  # once: it is the slowest thing here
    sum_C1 = powers_CV.sum(axis=1, keepdims=True)
    target_logit_C1 = mx.take_along_axis(logits_CV, target_C1, axis=1)
    loss = (mx.log(sum_C1) + top_C1 - target_logit_C1).sum()
    hit_CV = mx.arange(head.vocab)[None] == target_C1
    d_CV = (powers_CV / sum_C1 - hit_CV) * head.slope(logits_CV)
    return loss, d_CV.astype(products_CV.dtype)


def has_kernel() -> bool:
    """Whether MLX has the loss in one kernel; its CPU adds up in the logits' own dtype instead."""
    return mx.default_device() != mx.cpu


def _chunk_by_kernel(
    products_CV: mx.array, target_C1: mx.array, head: Head
) -> tuple[mx.array, mx.array]:
    plain = head.scale == 1.0 and head.softcap is None
    logits_CV = products_CV if plain else head.finish(products_CV)
    loss_C = partial(mx.fast.cross_entropy, targets=target_C1[:, 0])
    (losses_C,), (d_CV,) = mx.vjp(loss_C, [logits_CV], [mx.ones(len(target_C1))])
    d_CV = d_CV if plain else d_CV * head.slope(logits_CV)
    return losses_C.sum(), d_CV.astype(products_CV.dtype)


def logits_loss(logits_SV: mx.array, targets_S: mx.array) -> mx.array:
    """Summed cross-entropy in nats of logits that are already there."""
    logits_SV = logits_SV.astype(mx.float32)
    picked_S1 = mx.take_along_axis(logits_SV, targets_S[:, None], axis=1)
    return (mx.logsumexp(logits_SV, axis=1, keepdims=True) - picked_S1).sum()
