"""What calibration asks of a model that is read one decoder layer at a time, by any engine.

Shape letters: D features.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pippin.data.batches import Batch
from pippin.quantizers.in_turn import outputs_of

Moments: TypeAlias = dict[str, NDArray[np.float32]]


class ByLayer(ABC):
    """Moments come layer by layer: by inputs from the first layer on, by loss from the head down.

    Asked for in that order, one round through the network gives them all. An engine says how a
    batch begins, a `call` of its own that holds the hidden states, and how a layer takes calls on.
    """

    def __init__(self, layers: int, *, sequential: bool) -> None:
        """`sequential`: inputs of a layer follow from what the ones before it have become."""
        self._count, self._sequential = layers, sequential
        self._kind = ""
        self._round: Iterator[Moments] = iter(())

    @abstractmethod
    def begin(self, batch: Batch) -> Any:
        """A call of it, before the first layer."""

    @abstractmethod
    def through(self, index: int, calls: Sequence[Any]) -> None:
        """Take calls through a layer, as its weights are by now."""

    @abstractmethod
    def observe(self, index: int, calls: Sequence[Any], *, stay: bool) -> Moments:
        """The same, but for those that `stay` where they are; (D, D) of inputs, by linear."""

    @abstractmethod
    def observe_head(self, calls: Sequence[Any]) -> Moments:
        """That of the head, behind the last layer."""

    @abstractmethod
    def keep(self, index: int, calls: Sequence[Any]) -> None:
        """Put hidden states that enter a layer aside, for the way back."""

    @abstractmethod
    def weigh_head(self, calls: Sequence[Any], seed: int) -> Moments:
        """The head's moments by loss; calls hold the gradient by the last layer's outputs then."""

    @abstractmethod
    def weigh(self, index: int, calls: Sequence[Any]) -> Moments:
        """A layer's likewise, from its outputs' gradient to its inputs'."""

    def _by_inputs(self, batches: Sequence[Batch]) -> Iterator[Moments]:
        calls = [self.begin(batch) for batch in batches]
        for index in range(self._count):
            yield self.observe(index, calls, stay=self._sequential)
            if self._sequential:
                self.through(index, calls)
        yield self.observe_head(calls)

    def _by_loss(self, batches: Sequence[Batch], seed: int) -> Iterator[Moments]:
        calls = [self.begin(batch) for batch in batches]
        for index in range(self._count):
            self.keep(index, calls)
            self.through(index, calls)
        yield self.weigh_head(calls, seed)
        for index in reversed(range(self._count)):
            yield self.weigh(index, calls)

    def input_moments(
        self, batches: Sequence[Batch], names: Collection[str] | None = None
    ) -> Moments:
        """As Model.input_moments."""
        return self._ask("inputs", lambda: self._by_inputs(batches), names)

    def loss_moments(
        self, batches: Sequence[Batch], names: Collection[str] | None = None, seed: int = 0
    ) -> Moments:
        """As LossWeigher.loss_moments."""
        return self._ask("loss", lambda: self._by_loss(batches, seed), names)

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
