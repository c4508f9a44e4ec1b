"""AdamW on float32 masters: one compiled update, refused where a tensor does not move."""

from collections.abc import Callable
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from pippin.engines.arrays import find_saved, refuse_stuck
from pippin.recipe import Train

Arrays: TypeAlias = dict[str, mx.array]
MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """Owns the masters of the trainable tensors and their two moments, all float32."""

    def __init__(self, first: Arrays, train: Train) -> None:
        self.masters = first
        self.moments = [{name: mx.zeros_like(a) for name, a in first.items()} for _ in MOMENTS]
        self.updates = 0
        self._unmoved = set(first)
        self._update = mx.compile(_adamw(train))
        mx.eval(self.moments)

    def update(self, grads: Arrays, learning_rate: float, factor: float) -> None:
        """One update with the gradients times `factor`.

        Raises ModelError where a tensor did not move in the first two updates.
        """
        before = self.masters
        self.updates += 1
        scalars = mx.array([learning_rate, factor, float(self.updates)])
        self.masters, *self.moments = self._update(grads, before, *self.moments, scalars)
        mx.eval(self.masters, self.moments)
        if self._unmoved and learning_rate > 0:
            self._check(before)

    def state(self) -> dict[str, NDArray[Any]]:
        """Masters and moments on the host, and the count of updates."""
        out = {f"weights.{name}": np.array(array) for name, array in self.masters.items()}
        for moment, arrays in zip(MOMENTS, self.moments, strict=True):
            out |= {f"{moment}.{name}": np.array(array) for name, array in arrays.items()}
        out["updates"] = np.array([self.updates], np.int64)
        return out

    def restore(self, state: dict[str, NDArray[Any]]) -> None:
        """Take up what `state` returned."""
        self.updates = int(state["updates"][0])
        self.masters = _taken(state, "weights", self.masters)
        self.moments = [_taken(state, moment, self.masters) for moment in MOMENTS]
        self._unmoved = self._unmoved if self.updates < 2 else set()

    def _check(self, before: Arrays) -> None:
        still = {n for n in self._unmoved if bool(mx.array_equal(before[n], self.masters[n]))}
        self._unmoved = still
        refuse_stuck(still, self.updates, first=self.updates == 1)


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


def _taken(state: dict[str, NDArray[Any]], kind: str, like: Arrays) -> Arrays:
    return {
        name: mx.array(find_saved(state, f"{kind}.{name}", array.shape))
        for name, array in like.items()
    }
