"""AdamW on float32 masters: one compiled update."""

from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

import mlx.core as mx
import numpy as np

from pippin.engines import Weights
from pippin.recipe import Train

Arrays: TypeAlias = dict[str, mx.array]


class Optimizer:
    """Owns the masters of the trainable tensors and their two moments, all float32."""

    def __init__(self, first: Arrays, train: Train) -> None:
        self.masters = self._before = first
        self.moments = [{name: mx.zeros_like(a) for name, a in first.items()} for _ in range(2)]
        self._update = mx.compile(_adamw(train))
        mx.eval(self.moments)

    def update(self, grads: Arrays, learning_rate: float, factor: float, number: int) -> None:
        """Update `number`, counted from 1, with the gradients times `factor`."""
        self._before = self.masters
        scalars = mx.array([learning_rate, factor, float(number)])
        self.masters, *self.moments = self._update(grads, self.masters, *self.moments, scalars)
        mx.eval(self.masters, self.moments)

    def moved(self, names: Collection[str]) -> set[str]:
        """Those of the masters that the last update changed."""
        pairs = {name: (self._before[name], self.masters[name]) for name in names}
        return {name for name, pair in pairs.items() if not bool(mx.array_equal(*pair))}

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
        grads: Arrays, masters: Arrays, means: Arrays, squares: Arrays, scalars: mx.array
    ) -> tuple[Arrays, ...]:
        rate, factor, count = scalars[0], scalars[1], scalars[2]
        step = rate / (1 - train.beta1**count)
        root = mx.sqrt(1 - train.beta2**count)
        out: tuple[Arrays, ...] = ({}, {}, {})
        for name, master in masters.items():
            grad = grads[name] * factor
            mean = means[name] * train.beta1 + grad * (1 - train.beta1)
            square = squares[name] * train.beta2 + grad * grad * (1 - train.beta2)
            kept = master * (1 - rate * train.weight_decay)
            moved = kept - step * mean / (mx.sqrt(square) / root + train.eps)
            for made, array in zip(out, (moved, mean, square), strict=True):
                made[name] = array
        return out

    return update
