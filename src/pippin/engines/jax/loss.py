"""Cross-entropy of the head on scored positions only, in chunks: no tensor of tokens x vocabulary.

Shape letters: S scored positions (rounded up), C positions of one chunk, D hidden, V vocabulary.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from pippin.engines.jax.architecture import Spec
from pippin.engines.jax.decoder import logits
from pippin.engines.jax.products import EXACT, exact_product

CHUNK_BYTES = 1 << 25


def chunk_size(spec: Spec) -> int:
    """Positions at a time, a power of two: float32 logits of up to 32 MiB."""
    most = max(16, min(512, CHUNK_BYTES // (4 * spec.vocab_size)))
    return 1 << (most.bit_length() - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """Whose head it is, and whether its weight is trained."""

    spec: Spec
    trained: bool


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def head_loss(
    head: Head, hidden_SD: Array, weight_VD: Array, targets_S: Array, count: Array
) -> Array:
    """Summed cross-entropy in nats of the first `count` positions; S is a multiple of the chunk.

    Gradients go to the hidden states, and to the head's weight where it is `trained`. They are made
    in the forward pass, chunk by chunk, while the logits are there.
    """
    size = chunk_size(head.spec)

    def add(number: Array, total: Array) -> Array:
        hidden_CD, targets_C, valid_C = _part(number, size, hidden_SD, targets_S, count)
        return total + _losses(logits(head.spec, weight_VD, hidden_CD), targets_C, valid_C)

    return lax.fori_loop(0, _chunks(count, size), add, jnp.zeros((), jnp.float32))


def _forward(
    head: Head, hidden_SD: Array, weight_VD: Array, targets_S: Array, count: Array
) -> tuple[Array, Any]:
    spec, trained = head.spec, head.trained
    size = chunk_size(spec)
    start = (
        jnp.zeros((), jnp.float32),
        jnp.zeros_like(hidden_SD),
        jnp.zeros(weight_VD.shape if trained else (), jnp.float32),
    )

    def add(number: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        loss, d_hidden_SD, d_weight_VD = sums
        hidden_CD, targets_C, valid_C = _part(number, size, hidden_SD, targets_S, count)
        logits_CV = logits(spec, weight_VD, hidden_CD)
        d_CV = _slopes(spec, logits_CV, targets_C, valid_C).astype(hidden_SD.dtype)
        d_hidden_CD = jnp.matmul(d_CV, weight_VD, precision=EXACT)
        d_hidden_SD = lax.dynamic_update_slice(d_hidden_SD, d_hidden_CD, (number * size, 0))
        if trained:
            d_weight_VD = d_weight_VD + exact_product(d_CV.T, hidden_CD)
        return loss + _losses(logits_CV, targets_C, valid_C), d_hidden_SD, d_weight_VD

    loss, *grads = lax.fori_loop(0, _chunks(count, size), add, start)
    return loss, (*grads, weight_VD)


def _backward(head: Head, saved: Any, upstream: Array) -> tuple[Any, ...]:
    d_hidden_SD, d_weight_VD, weight_VD = saved
    d_weight = d_weight_VD if head.trained else jnp.zeros_like(weight_VD)  # nobody reads the zeros
    d_hidden_SD = d_hidden_SD * upstream.astype(d_hidden_SD.dtype)
    return d_hidden_SD, (d_weight * upstream).astype(weight_VD.dtype), None, None


head_loss.defvjp(_forward, _backward)


def _chunks(count: Array, size: int) -> Array:
    return (count + size - 1) // size


def _part(
    number: Array, size: int, hidden_SD: Array, targets_S: Array, count: Array
) -> tuple[Array, Array, Array]:
    start = number * size
    hidden_CD = lax.dynamic_slice_in_dim(hidden_SD, start, size)
    targets_C = lax.dynamic_slice_in_dim(targets_S, start, size)
    return hidden_CD, targets_C, start + jnp.arange(size) < count


def _losses(logits_CV: Array, targets_C: Array, valid_C: Array) -> Array:
    picked_C = jnp.take_along_axis(logits_CV, targets_C[:, None], 1)[:, 0]
    return jnp.where(valid_C, jax.nn.logsumexp(logits_CV, 1) - picked_C, 0.0).sum()


def _slopes(spec: Spec, logits_CV: Array, targets_C: Array, valid_C: Array) -> Array:
    """The loss's gradient with respect to h W^T."""
    hits_CV = targets_C[:, None] == jnp.arange(logits_CV.shape[1])[None]
    d_CV = jnp.where(valid_C[:, None], jax.nn.softmax(logits_CV, 1) - hits_CV, 0.0)
    if spec.head_softcap is None:
        return d_CV
    return d_CV * (1.0 - (logits_CV / spec.head_softcap) ** 2)
