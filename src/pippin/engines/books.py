"""What a trainer keeps besides its arrays: counters, which tensors have moved, the saved state."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from pippin.data.batches import Batch
from pippin.engines import StepResult, Weights
from pippin.engines.arrays import find_saved, refuse_stuck

PARTS = ("weights", "exp_avg", "exp_avg_sq")
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


class Books:
    """Counts steps and the updates among them, of trainable tensors with `shapes`, by name.

    `unmoved` are those that no update has changed yet.
    """

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self.steps, self.updates = 0, 0
        self.unmoved = set(shapes)

    def enter(self, result: StepResult) -> bool:
        """Count a step. Whether it makes an update: its loss and gradient norm are finite."""
        good = math.isfinite(result.loss_sum) and math.isfinite(result.grad_norm)
        self.steps += 1
        self.updates += good
        return good

    def watch(self, learning_rate: float, moved: Callable[[Collection[str]], set[str]]) -> None:
        """After an update: `moved` tells which of the tensors it is given have moved.

        Raises ModelError where one has not in the first two updates. Nothing is asked once all
        have, nor where the learning rate is 0.
        """
        if self.unmoved and learning_rate > 0:
            self.unmoved -= moved(self.unmoved)
            refuse_stuck(self.unmoved, self.updates, first=self.updates == 1)

    def state(self, parts: Sequence[Weights]) -> Weights:
        """What `restore` takes: `parts` are arrays by name in the order of PARTS."""
        named = zip(PARTS, parts, strict=True)
        saved = {f"{part}.{name}": a for part, arrays in named for name, a in arrays.items()}
        counts = {"steps": self.steps, "updates": self.updates}
        return saved | {name: np.array([count], np.int64) for name, count in counts.items()}

    def restore(self, state: Weights) -> list[Weights]:
        """Take up the counters of a state. Returns its parts, as `state` was given them.

        Raises ModelError where an array is missing or of another shape.
        """
        parts = [
            {
                name: find_saved(state, f"{part}.{name}", tuple(shape))
                for name, shape in self.shapes.items()
            }
            for part in PARTS
        ]
        self.steps, self.updates = int(state["steps"][0]), int(state["updates"][0])
        self.unmoved = self.unmoved if self.updates < 2 else set()
        return parts


def scored_tokens(batches: Sequence[Batch]) -> int:
    """Of an update's micro-batches together: each weighs the same."""
    tokens = sum(batch.scored_tokens for batch in batches)
    assert tokens > 0, "a step needs a scored token"
    return tokens


def seed_of(seed: int, step: int, *part: int) -> int:
    """Where the random numbers of a step or its `part` start: a state needs none of its own."""
    return int(np.random.SeedSequence((seed, step, *part)).generate_state(1, np.uint64)[0])
