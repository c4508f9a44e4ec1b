"""X^T X of every linear's inputs: what calibrated quantizers minimise their error against.

Shape letters: N real tokens, D features.
"""

import contextlib
from collections.abc import Collection, Generator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from numpy.typing import NDArray

from pippin.engines.mlx.lora import LINEARS, LoraLinear
from pippin.engines.mlx.probe import run_rows
from pippin.engines.mlx.rows import Rows

HEAD = "lm_head"


class Collector:
    """Sums X^T X by linear. Neighbours that read the same tensor share one sum."""

    def __init__(self) -> None:
        self.sums: dict[str, mx.array] = {}
        self.owner: dict[str, str] = {}
        self.real_N = mx.array([], mx.int32)
        self._last: tuple[mx.array, str] | None = None

    def add(self, name: str, x: mx.array) -> None:
        if self._last is not None and self._last[0] is x:
            self.owner[name] = self._last[1]
            return
        self._last, self.owner[name] = (x, name), name
        x_ND = x.reshape(-1, x.shape[-1])[self.real_N].astype(mx.float32)
        moment_DD = x_ND.T @ x_ND
        self.sums[name] = self.sums[name] + moment_DD if name in self.sums else moment_DD
        mx.eval(self.sums[name])  # or the inputs of all layers would wait in memory

    def moments(self) -> dict[str, NDArray[np.float32]]:
        """The sums by linear, on the host; the collector's own are spent."""
        sums = {name: np.array(total) for name, total in self.sums.items()}
        # The classes that watch hold the collector until cycles are looked for.
        self.sums, self._last = {}, None
        return {name: sums[owner] for name, owner in self.owner.items()}


def input_moments(
    network: nn.Module, batches: Sequence[Rows], names: Collection[str] | None = None
) -> dict[str, NDArray[np.float32]]:
    """By linear's name, the head included: (D, D) float32 over the batches' real tokens.

    With `names`, of those linears alone.
    """
    collector = Collector()
    watched = {
        name: module
        for name, module in linears(network)
        if name != HEAD and (names is None or name in names)
    }
    with watching(watched, collector):
        for rows in batches:
            collector.real_N = rows.real_N
            hidden_BTD = run_rows(network, rows)
            if names is None or HEAD in names:
                collector.add(HEAD, hidden_BTD)
    return collector.moments()


@contextlib.contextmanager
def watching(watched: Mapping[str, Any], collector: Collector) -> Generator[None]:
    """Inside, the collector sees what enters these linears."""
    kinds = [(module, type(module)) for module in watched.values()]
    try:
        for name, module in watched.items():
            module.__class__ = _watching(type(module), name, collector)
        yield
    finally:
        for module, kind in kinds:
            module.__class__ = kind


def linears(network: nn.Module) -> list[tuple[str, Any]]:
    """Adapted linears and plain ones; not the base inside an adapted one."""
    found = [(n, m) for n, m in network.named_modules() if isinstance(m, (*LINEARS, LoraLinear))]
    return [(n, m) for n, m in found if not n.endswith(".base")]


def _watching(kind: Any, name: str, collector: Collector) -> type:
    class Watching(kind):
        def __call__(self, x: mx.array) -> mx.array:
            collector.add(name, x)
            return super().__call__(x)

    return Watching
