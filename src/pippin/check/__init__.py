"""Probes of a device: what an engine offers, how a figure becomes a verdict, the table of engines.

A probe computes one thing on the device and yields how far it lies from an exact reference.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, TypeAlias

Verdict: TypeAlias = Literal["pass", "inaccurate", "wrong", "not there"]
Case: TypeAlias = tuple[str, float]  # where it was measured, the error there
Fallback: TypeAlias = Literal["", "attention", "dtype", "compile", "device"]

# Each module has `probes(device, shapes)`, as `Suite` says.
PROBES = {
    "jax": "pippin.engines.jax.probes",
    "mlx": "pippin.engines.mlx.probes",
    "torch": "pippin.engines.torch.probes",
}
WRONG = 10.0  # an error of more than this many tolerances is no rounding


class NotThere(RuntimeError):
    """Raised by a probe whose subject this device or this build does not have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shapes:
    """Sizes the work will have; probes use them beside the edges they know.

    `tokens` is batch x length of one micro-batch.
    """

    tokens: int = 4096
    length: int = 512
    vocab: int = 49152
    hidden: int = 128
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """One question to the device.

    `cases` yields (where, error); 0 is exact, NaN and infinity are wrong. `tolerance` is the
    largest error that is rounding. `remedy` tells a person the way round a failure; `avoid` names
    the same for the plan: another attention path, float32, no compilation, another device.
    """

    name: str
    tolerance: float
    cases: Callable[[], Iterator[Case]]
    remedy: str
    avoid: Fallback = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What a probe found: the largest error and where, or why there is no figure in `detail`."""

    probe: str
    verdict: Verdict
    figure: float | None
    tolerance: float
    detail: str
    remedy: str
    avoid: Fallback
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """All fields; a figure that JSON cannot hold is written as text."""
        figure = self.figure
        finite = figure is None or math.isfinite(figure)
        return {**asdict(self), "figure": figure if finite else str(figure)}


class Suite(Protocol):
    """A module of PROBES."""

    def describe(self, device: str) -> str:
        """The device and the framework's version in words; UsageError where it is not there."""
        ...

    def probes(self, device: str, shapes: Shapes) -> tuple[Probe, ...]:
        """Every probe of the engine on `device` (`auto` is its best)."""
        ...
