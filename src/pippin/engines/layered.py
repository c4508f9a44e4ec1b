"""What calibration asks of a model that is read one decoder layer at a time, by any engine.

Shape letters: D features.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pippin.data.batches import Batch
from pippin.quantizers.in_turn import outputs_of

Moments: TypeAlias = dict[str, NDArray[np.float32]]


class ByLayer(ABC):
    """Moments come layer by layer: by inputs from the first layer on, by loss from the head down.

    Asked for in that order, one round through the network gives them all.
    """

    _kind = ""
    _round: Iterator[Moments] = iter(())

    @abstractmethod
    def by_inputs(self, batches: Sequence[Batch]) -> Iterator[Moments]:
        """(D, D) by linear: those of every layer, then the head's."""

    @abstractmethod
    def by_loss(self, batches: Sequence[Batch], seed: int) -> Iterator[Moments]:
        """The head's, then those of every layer from the last one back."""

    def input_moments(
        self, batches: Sequence[Batch], names: Collection[str] | None = None
    ) -> Moments:
        """As Model.input_moments."""
        return self._ask("inputs", lambda: self.by_inputs(batches), names)

    def loss_moments(
        self, batches: Sequence[Batch], names: Collection[str] | None = None, seed: int = 0
    ) -> Moments:
        """As LossWeigher.loss_moments."""
        return self._ask("loss", lambda: self.by_loss(batches, seed), names)

    def _ask(
        self, kind: str, begin: Callable[[], Iterator[Moments]], names: Collection[str] | None
    ) -> Moments:
        """Go on until all are found; a layer that has passed, or another kind, takes a round."""
        found: Moments = {}
        if self._kind != kind:
            self._kind, self._round = kind, iter(())
        for again in (False, True):
            if again:
                self._round = begin()
            for made in self._round:
                asked = made.keys() if names is None else {*names, *map(outputs_of, names)}
                found |= {n: m for n, m in made.items() if n in asked}
                if names is not None and found.keys() >= set(names):
                    return found
        return found
