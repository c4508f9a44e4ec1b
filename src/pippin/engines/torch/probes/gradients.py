"""Probes of training: gradients at the planned batch, cross-entropy, one optimizer step.

Shape letters: T tokens, D hidden, F feed-forward, V vocabulary, S scored positions.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from pippin.check import Case
from pippin.check.families import FEWER, FLOAT32, Family, Single
from pippin.engines.torch.loss import Head, head_loss
from pippin.engines.torch.probes.bench import Bench, exact, gap

TOKENS = (32767, 32769, 65537)
VOCABS = (32000, 151936, 256000)
LEARNING_RATE, BETA1, BETA2, EPS, DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.1


def head_weight(bench: Bench, dtype: torch.dtype) -> Iterator[Case]:
    """A head's weight gradient: a product whose inner length is batch x tokens."""
    for tokens in sorted({*TOKENS, bench.shapes.tokens}):
        hidden_TD = bench.draw(tokens, 24, dtype=dtype)
        upstream_TV = bench.draw(tokens, 40, dtype=dtype, seed=1)
        weight_VD = bench.draw(40, 24, dtype=dtype, seed=2).requires_grad_()
        functional.linear(hidden_TD, weight_VD).backward(upstream_TV)
        yield f"{tokens} tokens", gap(_grad(weight_VD), exact(upstream_TV).T @ exact(hidden_TD))


def head_input(bench: Bench, dtype: torch.dtype) -> Iterator[Case]:
    """A head's input gradient: a product whose inner length is the vocabulary."""
    for vocab in sorted({*VOCABS, bench.shapes.vocab}):
        hidden = bench.draw(17, 24, dtype=dtype).requires_grad_()
        weight_VD = bench.draw(vocab, 24, dtype=dtype, seed=1)
        upstream = bench.draw(17, vocab, dtype=dtype, seed=2)
        functional.linear(hidden, weight_VD).backward(upstream)
        yield f"vocabulary {vocab}", gap(_grad(hidden), exact(upstream) @ exact(weight_VD))


def block(bench: Bench, dtype: torch.dtype) -> Iterator[Case]:
    """Every gradient of a normed, gated feed-forward block at the planned batch x tokens."""
    shape = (bench.shapes.tokens, 48)
    hidden_TD, upstream_TD = (bench.draw(*shape, dtype=dtype, seed=s) for s in (0, 1))
    weights = [
        bench.draw(*size, dtype=dtype, seed=seed) * 0.15
        for seed, size in enumerate(((96, 48), (96, 48), (48, 96)), 2)
    ]
    leaves = [x.detach().requires_grad_() for x in (hidden_TD, *weights)]
    references = [exact(x).requires_grad_() for x in leaves]
    _gated(*leaves).backward(upstream_TD)
    _gated(*references).backward(exact(upstream_TD))
    for name, ours, wanted in zip(("input", "gate", "up", "down"), leaves, references, strict=True):
        yield f"{name}, {bench.shapes.tokens} tokens", gap(_grad(ours), _grad(wanted))


def _gated(hidden_TD: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> Tensor:
    normed = functional.rms_norm(hidden_TD, (hidden_TD.shape[1],), eps=1e-6)
    inner = functional.silu(normed @ gate_FD.T) * (normed @ up_FD.T)
    return hidden_TD + inner @ down_DF.T


def cross_entropy(bench: Bench, dtype: torch.dtype) -> Iterator[Case]:
    """PyTorch's loss and its gradient over large vocabularies, ignored positions among them."""
    for vocab in sorted({*VOCABS, bench.shapes.vocab}):
        logits_SV = (bench.draw(9, vocab, dtype=dtype) * 4).requires_grad_()
        targets_S = torch.arange(9) * (vocab // 9)
        targets_S[4] = -100
        reference = exact(logits_SV).requires_grad_()
        loss = functional.cross_entropy(logits_SV.float(), bench.put(targets_S))
        wanted = functional.cross_entropy(reference, targets_S)
        loss.backward()
        wanted.backward()
        yield f"vocabulary {vocab}, loss", gap(loss, wanted)
        yield f"vocabulary {vocab}, gradient", gap(_grad(logits_SV), _grad(reference))


def own_loss(bench: Bench, dtype: torch.dtype) -> Iterator[Case]:
    """The engine's own chunked loss from hidden states, as it trains."""
    for vocab in (32000, bench.shapes.vocab):
        hidden_SD = bench.draw(40, 32, dtype=dtype).requires_grad_()
        weight_VD = bench.draw(vocab, 32, dtype=dtype, seed=1)
        targets_S = torch.arange(40) * (vocab // 40)
        loss = head_loss(hidden_SD, bench.put(targets_S), Head(weight_VD=weight_VD))
        loss.backward()
        reference = exact(hidden_SD).requires_grad_()
        logits = reference @ exact(weight_VD).T
        wanted = functional.cross_entropy(logits, targets_S, reduction="sum")
        wanted.backward()
        yield f"vocabulary {vocab}, loss", gap(loss, wanted)
        yield f"vocabulary {vocab}, gradient", gap(_grad(hidden_SD), _grad(reference))


def optimizer(bench: Bench) -> Iterator[Case]:
    """Two AdamW updates: every tensor moved, and as the formula says."""
    tensors = {f"{shape}": bench.draw(*shape) for shape in ((64, 64), (7,), (3, 1, 5))}
    yield from _updates(bench, tensors)


def optimizer_layouts(bench: Bench) -> Iterator[Case]:
    """The same on parameters that do not lie in memory row by row."""
    tensors = {
        "transposed": bench.draw(40, 24).T,
        "slice": bench.draw(50, 8)[11:30],
    }
    yield from _updates(bench, tensors)


def _updates(bench: Bench, tensors: dict[str, Tensor]) -> Iterator[Case]:
    parameters = {name: nn.Parameter(x.detach()) for name, x in tensors.items()}
    before = {name: exact(p) for name, p in parameters.items()}
    betas = (BETA1, BETA2)
    adam = torch.optim.AdamW(
        parameters.values(), LEARNING_RATE, betas, EPS, weight_decay=DECAY, fused=True
    )
    grads = [{n: bench.draw(*p.shape, seed=s) for n, p in parameters.items()} for s in (5, 6)]
    for step in grads:
        for name, parameter in parameters.items():
            parameter.grad = torch.empty_like(parameter).copy_(step[name])
        adam.step()
    for name, parameter in parameters.items():
        wanted = _adamw(before[name], [exact(step[name]) for step in grads])
        yield name, gap(exact(parameter) - before[name], wanted - before[name])


def _adamw(weights: Tensor, grads: list[Tensor]) -> Tensor:
    """arXiv 1711.05101, algorithm 2, in float64."""
    mean = square = torch.zeros_like(weights)
    for step, grad in enumerate(grads, 1):
        mean = BETA1 * mean + (1 - BETA1) * grad
        square = BETA2 * square + (1 - BETA2) * grad**2
        size = (square / (1 - BETA2**step)).sqrt() + EPS
        weights = weights * (1 - LEARNING_RATE * DECAY)
        weights = weights - LEARNING_RATE * mean / (1 - BETA1**step) / size
    return weights


def norm(bench: Bench) -> Iterator[Case]:
    """The norm of many gradients, which clipping divides by."""
    grads = [bench.draw(*shape, seed=n) for n, shape in enumerate(((300, 200), (1000,), (1,)))]
    wanted = torch.cat([exact(x).flatten() for x in grads]).norm()
    yield "three tensors", gap(nn.utils.get_total_norm(grads), wanted)


def _grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


FAMILIES = (
    Family(name="gradient.head weight", measure=head_weight, remedy=FEWER),
    Family(name="gradient.head input", measure=head_input, remedy=FLOAT32, avoid="dtype"),
    Family(name="gradient.block", measure=block, remedy=FEWER),
    Family(name="loss.cross-entropy", measure=cross_entropy, remedy=FLOAT32, avoid="dtype"),
    Family(name="loss.own", measure=own_loss, remedy=FLOAT32, avoid="dtype"),
    Single(name="optimizer.step", measure=optimizer, tolerance=1e-3),
    Single(
        name="optimizer.layouts",
        measure=optimizer_layouts,
        remedy="make parameters contiguous before training",
        tolerance=1e-3,
    ),
    Single(name="gradient.norm", measure=norm, tolerance=1e-5),
)
