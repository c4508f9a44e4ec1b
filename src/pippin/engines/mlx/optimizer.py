"""AdamW on float32 masters: one compiled update, clipped, none where something is not finite."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx
import numpy as np

from pippin.engines import Weights
from pippin.recipe import Train

Arrays: TypeAlias = dict[str, mx.array]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    """What the micro-batches of an update gave: loss and gradients summed over `tokens`."""

    loss: mx.array
    grads: Arrays
    tokens: int


class Optimizer:
    """Owns the masters of the trainable tensors and their two moments, all float32."""

    def __init__(self, first: Arrays, train: Train) -> None:
        self.masters = first
        self.moments = [{name: mx.zeros_like(a) for name, a in first.items()} for _ in range(2)]
        self._update = mx.compile(_adamw(train))
        mx.eval(self.masters, self.moments)

    def update(self, sums: Sums, learning_rate: float, number: int) -> tuple[mx.array, mx.array]:
        """Update `number`, counted from 1; none where loss or gradient norm is not finite.

        Returns both, still being computed: the device is given everything at once.
        """
        scalars = mx.array([learning_rate, float(number), float(sums.tokens)])
        norm = mx.sqrt(_squares(sums.grads)) / sums.tokens
        state = self.masters, *self.moments
        self.masters, *self.moments = self._update(sums.grads, *state, scalars, sums.loss, norm)
        mx.async_eval(self.masters, self.moments, sums.loss, norm)
        return sums.loss, norm

    def parts(self) -> list[Weights]:
        """Masters and moments, copied to the host."""
        return [
            {name: np.array(array) for name, array in arrays.items()}
            for arrays in (self.masters, *self.moments)
        ]

    def restore(self, parts: Sequence[Weights]) -> None:
        """Take up what `parts` returned."""
        self.masters, *self.moments = (
            {name: mx.array(array) for name, array in arrays.items()} for arrays in parts
        )


def _adamw(train: Train) -> Callable[..., tuple[Arrays, ...]]:
    """AdamW with bias correction, as PyTorch computes it (https://arxiv.org/abs/1711.05101)."""

    def update(
        grads: Arrays, masters: Arrays, means: Arrays, squares: Arrays, *figures: mx.array
    ) -> tuple[Arrays, ...]:
        (rate, count, tokens), loss, norm = figures
        good = mx.isfinite(loss) & mx.isfinite(norm)
        factor = _clip(norm, train.max_grad_norm) / tokens
        step = rate / (1 - train.beta1**count)
        root = mx.sqrt(1 - train.beta2**count)
        out: tuple[Arrays, ...] = ({}, {}, {})
        for name, master in masters.items():
            grad = grads[name] * factor
            mean = means[name] * train.beta1 + grad * (1 - train.beta1)
            square = squares[name] * train.beta2 + grad * grad * (1 - train.beta2)
            kept = master * (1 - rate * train.weight_decay)
            moved = kept - step * mean / (mx.sqrt(square) / root + train.eps)
            new, old = (moved, mean, square), (master, means[name], squares[name])
            for made, *pair in zip(out, new, old, strict=True):
                made[name] = mx.where(good, *pair)
        return out

    return update


def _clip(norm: mx.array, limit: float) -> mx.array:
    return mx.minimum(limit / (norm + 1e-6), 1.0) if limit else mx.array(1.0)


def _squares(grads: Arrays) -> mx.array:
    """The squared norm of all gradients together."""
    return mx.stack([(g * g).sum() for g in grads.values()]).sum()
