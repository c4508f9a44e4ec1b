"""What an update of a training depends on but no model decides: its learning rate, when to stop."""

import math
import statistics
from collections.abc import Callable, Sequence

from pippin.recipe import Schedule, Train

WINDOW = 20  # recent losses that a new one is compared with
ENOUGH = 10  # fewer say nothing about what is usual
NOISE = 1.0  # nats: a well-learned task's small losses vary by large factors and mean no harm

SHAPES: dict[Schedule, Callable[[float], float]] = {
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    "linear": lambda done: 1.0 - done,
    "constant": lambda done: 1.0,
}


def learning_rate(train: Train, step: int, total: int) -> float:
    """The rate of update number `step`, counted from 0, of `total`.

    It rises over `warmup_steps` updates, peaks in the next and falls to `min_learning_rate`, which
    it would reach in update `total`. That is transformers' schedule without its first update, whose
    rate is 0. A constant schedule stays at its peak.
    """
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / (train.warmup_steps + 1)
    done = (step - train.warmup_steps) / max(1, total - train.warmup_steps)
    fall = train.learning_rate - train.min_learning_rate
    return train.min_learning_rate + fall * SHAPES[train.schedule](done)


def total_steps(train: Train, steps_per_epoch: int) -> int:
    """Updates of the whole training."""
    if train.steps is not None:
        return train.steps
    return max(1, math.ceil(train.epochs * steps_per_epoch))


def fault(loss: float, grad_norm: float, recent: Sequence[float], spike: float) -> str | None:
    """What is wrong with an update, in words; None when nothing is.

    `recent` are the losses before it; `spike` the factor over their median that is too much, where
    it is more than noise.
    """
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    if not math.isfinite(grad_norm):
        return f"the gradient's norm is {grad_norm} (loss {loss:.4g})"
    usual = statistics.median(recent) if len(recent) >= ENOUGH else math.inf
    if spike and loss > max(spike * usual, usual + NOISE):
        return f"the loss is {loss:.4g}, {loss / usual:.1f} times the recent median of {usual:.4g}"
    return None
