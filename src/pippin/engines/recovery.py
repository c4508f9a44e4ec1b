"""Scales and zero points of codes, and norms, tuned until the predictions are the parent's again.

They follow the gradient of the KL divergence from the parent's predictions. Held-out rows say
whether it was worth it. What every engine does of that stands here.

Shape letters: D hidden.
"""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from pippin.data.batches import Batch
from pippin.engines import Weights
from pippin.engines.coded import dither
from pippin.errors import ModelError
from pippin.model import names
from pippin.model.quantized import DenseView

# Adam's step in shares of a scale, or of a norm's size: its largest, after some updates and before
# it falls to nothing. Less than so many updates do not even out the noise of steps as large.
LEARNING_RATE, UPDATES, WARMUP, BETAS = 1e-3, 100, 3, (0.9, 0.95)
# A mean's gradients are too small for half precision, and a factor is nothing to Adam.
GAIN = 256.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Tune:
    """How often batches are gone through, in which order, and how many at their start are `fresh`.

    An eighth of those is held out. The codes were chosen by the rows of the others.
    """

    fresh: int
    passes: int = 1
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovered:
    """Tuned scales, zero points and norms by tensor name, none where they gave nothing.

    `before` and `after`: KL from the parent in nats a token, over `tokens` held-out ones.
    """

    weights: Weights
    before: float
    after: float
    tokens: int


@runtime_checkable
class Recoverer(Protocol):
    """What the models of some engines can do besides: tune the scales of their own codes."""

    def recover(self, quantized: Path, batches: Sequence[Batch], tune: Tune) -> Recovered:
        """Tune scales, zero points and norms of the folder until it predicts as this model does.

        One update a batch and pass; some are held out. The model is the quantized one afterwards.
        Raises ModelError where it has no head of its own formula.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    """A norm's weight (D,) before the first update, in float32; it moves in shares of its `size`.

    Where a value rounds over to the next is fixed for each by `added_D`, as it is for scales.
    """

    first_D: NDArray[np.float32]
    added_D: NDArray[np.float32]
    size: float
    dtype: np.dtype[Any]


class Tuning(Protocol):
    """A network that has become the quantized one, and what its parent predicts of every batch."""

    def divergence(self, batch: int) -> float:
        """KL from the parent in nats, summed over the batch's real tokens."""
        ...

    def update(self, batch: int, learning_rate: float) -> None:
        """One update of Adam with `BETAS`, on the batch's mean."""
        ...

    def scales(self) -> Weights:
        """Scales and zero points as they would be stored, by tensor."""
        ...

    def norms(self) -> Weights:
        """Norms likewise."""
        ...

    def undo_norms(self) -> None:
        """Give norms back the weights they had."""
        ...


def read_norms(view: DenseView, coded: Container[str], seed: int) -> dict[str, Norm]:
    """The norms of a folder by tensor name; none of the linears `coded` is one."""
    rng = np.random.default_rng(seed)
    return {
        name: _norm(view.read(name), rng)
        for name, spec in view.tensors.items()
        if len(spec.shape) == 1 and name.endswith(".weight") and names.module(name) not in coded
    }


def _norm(weight_D: NDArray[Any], rng: np.random.Generator) -> Norm:
    first_D = weight_D.astype(np.float32)
    return Norm(
        first_D=first_D,
        added_D=dither(weight_D, rng),
        size=float(np.sqrt(np.square(first_D).mean())),
        dtype=weight_D.dtype,
    )


def recover(tuning: Tuning, tokens: Sequence[int], tune: Tune) -> Recovered:
    """Tune on all batches but every eighth fresh one; what they say of norms, and of all, decides.

    `tokens` are every batch's real ones.
    """
    # Batches come longest first: whatever length rows have, some are held out.
    held_out = range(min(7, tune.fresh - 1), tune.fresh, 8)
    heard = sum(tokens[i] for i in held_out)

    def divergence() -> float:
        return sum(tuning.divergence(i) for i in held_out) / heard

    before = divergence()
    _tune(tuning, [i for i in range(len(tokens)) if i not in held_out], tune)
    after, norms = divergence(), tuning.norms()
    tuning.undo_norms()
    without = divergence()
    if without <= after:  # norms are few, and sway everything
        after, norms = without, {}
    weights = tuning.scales() | norms if after < before else {}
    return Recovered(weights=weights, before=before, after=after, tokens=heard)


def _tune(tuning: Tuning, batches: Sequence[int], tune: Tune) -> None:
    """One update a batch and pass, each in an order of the seed's."""
    rng = np.random.default_rng(tune.seed)
    order = [i for _ in range(tune.passes) for i in rng.permutation(batches).tolist()]
    highest = LEARNING_RATE * min(1.0, math.sqrt(len(order) / UPDATES))
    for done, i in enumerate(order):
        rise = min(1.0, (done + 1) / WARMUP)
        fall = 0.5 * (1 + math.cos(math.pi * done / len(order)))
        tuning.update(i, highest * rise * fall)


def refuse_no_head() -> ModelError:
    """For a model whose logits are no plain product of its hidden states."""
    return ModelError(
        "scales are tuned through a head that is one product, this model's is not",
        "set quantize.recover_tokens = 0",
    )
