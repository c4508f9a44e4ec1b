"""Probes of training on MLX: gradients at the planned tokens, losses, an update, compiled code.

Shape letters: T tokens, D hidden, V vocabulary.
"""

from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from pippin.check import Case, Shapes
from pippin.check.families import FEWER, FLOAT32, Family, Single
from pippin.engines.mlx.optimizer import Optimizer, Sums
from pippin.engines.mlx.probes.bench import draw, exact, gap
from pippin.recipe import Train

TOKENS = (32767, 32769, 65537)
VOCABS = (32000, 151936)
RATE = 1e-3


def weight_gradient(shapes: Shapes, dtype: mx.Dtype) -> Iterator[Case]:
    """A linear's weight gradient: a product whose inner length is batch x tokens."""
    for tokens in sorted({*TOKENS, shapes.tokens}):
        hidden, upstream = draw(tokens, 24, dtype=dtype), draw(tokens, 40, dtype=dtype, seed=1)
        weight = draw(40, 24, dtype=dtype, seed=2)
        _, (found,) = mx.vjp(lambda w, x=hidden: x @ w.T, [weight], [upstream])
        yield f"{tokens} tokens", gap(found, exact(upstream).T @ exact(hidden))


def cross_entropy(shapes: Shapes, dtype: mx.Dtype) -> Iterator[Case]:
    """The loss and its gradient over large vocabularies."""
    for vocab in sorted({*VOCABS, shapes.vocab}):
        logits, targets = 4 * draw(9, vocab, dtype=dtype), np.arange(9) * (vocab // 9)
        ids = mx.array(targets)

        def loss(x: mx.array, ids: mx.array = ids) -> mx.array:
            return nn.losses.cross_entropy(x.astype(mx.float32), ids, reduction="sum")

        value, found = mx.value_and_grad(loss)(logits)
        powers = np.exp(exact(logits) - exact(logits).max(1, keepdims=True))
        chances = powers / powers.sum(1, keepdims=True)
        rows = np.arange(9)
        yield f"vocabulary {vocab}, loss", gap(value, -np.log(chances[rows, targets]).sum())
        chances[rows, targets] -= 1
        yield f"vocabulary {vocab}, gradient", gap(found, chances)


def update(shapes: Shapes) -> Iterator[Case]:
    """Two AdamW updates of the engine's optimizer: every tensor moved, as the formula says."""
    train = Train(weight_decay=0.1, max_grad_norm=0.0)
    first = {f"{shape}": draw(*shape) for shape in ((64, 64), (7,), (3, 1, 5))}
    before = {name: exact(array) for name, array in first.items()}
    optimizer = Optimizer(dict(first), train)
    steps = [{n: draw(*a.shape, seed=seed) for n, a in first.items()} for seed in (5, 6)]
    for number, grads in enumerate(steps, 1):
        sums = Sums(loss=mx.array(0.0), grads=grads, tokens=1)
        optimizer.update(sums, RATE, number)
    for name, array in optimizer.masters.items():
        wanted = _adamw(before[name], [exact(grads[name]) for grads in steps], train)
        yield name, gap(exact(array) - before[name], wanted - before[name])


def _adamw(weights: np.ndarray, grads: list[np.ndarray], train: Train) -> np.ndarray:
    """arXiv 1711.05101, algorithm 2, in float64."""
    mean = square = np.zeros_like(weights)
    for step, grad in enumerate(grads, 1):
        mean = train.beta1 * mean + (1 - train.beta1) * grad
        square = train.beta2 * square + (1 - train.beta2) * grad**2
        size = np.sqrt(square / (1 - train.beta2**step)) + train.eps
        weights = weights * (1 - RATE * train.weight_decay)
        weights = weights - RATE * mean / (1 - train.beta1**step) / size
    return weights


def compiled(shapes: Shapes, dtype: mx.Dtype) -> Iterator[Case]:
    """Compiled code gives the values of the same code in float64."""
    hidden, gate, up = (0.5 * draw(33, 64, dtype=dtype, seed=seed) for seed in range(3))

    def formula(x: mx.array, gate: mx.array, up: mx.array) -> mx.array:
        return mx.softmax(x + gate * mx.sigmoid(gate) * up, -1)

    x, g, u = exact(hidden), exact(gate), exact(up)
    powers = np.exp(x + g / (1 + np.exp(-g)) * u)
    wanted = powers / powers.sum(-1, keepdims=True)
    yield "a gated sum", gap(mx.compile(formula)(hidden, gate, up), wanted)


FAMILIES = (
    Family(name="gradient.weight", measure=weight_gradient, remedy=FEWER),
    Family(
        name="loss.cross-entropy", measure=cross_entropy, factor=8.0, remedy=FLOAT32, avoid="dtype"
    ),
    Single(name="optimizer.update", measure=update, tolerance=1e-3),
    Family(name="compile.parity", measure=compiled),
)
