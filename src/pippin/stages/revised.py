"""A model's tensors of which some are read as their codes have them: what later layers will see."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pippin.model import names
from pippin.model.weights import Shaped, Tensors


class Revised:
    """The tensors of `source`, but for those of one layer that `put` has brought."""

    def __init__(self, source: Tensors) -> None:
        self.folder, self._source = source.folder, source
        self._layer: int | None = None
        self._tensors: dict[str, NDArray[np.float32]] = {}

    def put(self, name: str, dense: NDArray[np.float32]) -> None:
        """Take up a tensor; the ones of other layers go back to what they were."""
        layer = names.layer(name)
        if layer != self._layer:
            self._layer, self._tensors = layer, {}
        self._tensors[name] = dense

    @property
    def tensors(self) -> Mapping[str, Shaped]:
        """The source's."""
        return self._source.tensors

    def read(self, name: str) -> NDArray[Any]:
        """A whole tensor, float32 where it was put."""
        return self._tensors[name] if name in self._tensors else self._source.read(name)

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Rows likewise."""
        if name in self._tensors:
            return self._tensors[name][start:stop]
        return self._source.read_rows(name, start, stop)
