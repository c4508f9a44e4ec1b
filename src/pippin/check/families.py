"""What all engines' probes share: tolerances, gaps, and probes that differ by dtype alone."""

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pippin.check import Case, Fallback, Probe

FLOATS = ("float32", "float16", "bfloat16")
# Largest error, relative to the largest value, that rounding explains.
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}

CPU = 'compute on the CPU: model.device = "cpu"'
FLOAT32 = 'compute in float32: model.dtype = "float32"'
FEWER = "keep batch x tokens below 32768: lower train.batch_rows, raise train.accumulate"


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Probes that differ by dtype alone: `name.dtype`, each with that dtype's tolerance.

    `measure(subject, dtype)` yields the cases. `tolerance` replaces the dtypes' own, as for what
    must be exact; `factor` widens them where long sums in that dtype are the framework's way.
    """

    name: str
    measure: Callable[..., Iterator[Case]]
    dtypes: tuple[str, ...] = FLOATS
    tolerance: float | None = None
    factor: float = 1.0
    remedy: str = CPU
    avoid: Fallback = "device"

    def probes(self, subject: Any, dtypes: Mapping[str, Any]) -> Iterator[Probe]:
        """One probe a dtype."""
        for name in self.dtypes:
            own = self.factor * TOLERANCE.get(name, 0.0)
            yield Probe(
                name=f"{self.name}.{name}",
                tolerance=own if self.tolerance is None else self.tolerance,
                cases=functools.partial(self.measure, subject, dtypes[name]),
                remedy=self.remedy,
                avoid=self.avoid,
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Single:
    """One probe, `measure(subject)`, with a tolerance of its own; exact where none is given."""

    name: str
    measure: Callable[..., Iterator[Case]]
    tolerance: float = 0.0
    remedy: str = CPU
    avoid: Fallback = "device"

    def probes(self, subject: Any, dtypes: Mapping[str, Any]) -> Iterator[Probe]:
        """The probe."""
        yield Probe(
            name=self.name,
            tolerance=self.tolerance,
            cases=functools.partial(self.measure, subject),
            remedy=self.remedy,
            avoid=self.avoid,
        )


def collect(
    package: str, modules: Sequence[str], subject: Any, dtypes: Mapping[str, Any]
) -> tuple[Probe, ...]:
    """The probes of each module's FAMILIES, in the modules' order.

    `subject` is the first argument of every measure; `dtypes` names the second: the engine's own
    dtype by its common name.
    """
    return tuple(
        probe
        for name in modules
        for family in importlib.import_module(f"{package}.{name}").FAMILIES
        for probe in family.probes(subject, dtypes)
    )


def gap(out: NDArray[np.float64], wanted: NDArray[np.float64]) -> float:
    """Largest difference as a share of the largest value wanted; infinite for another shape."""
    if out.shape != wanted.shape:
        return float("inf")
    return float(np.abs(out - wanted).max() / max(np.abs(wanted).max(), 1e-30))


def unequal(out: NDArray[np.float64], wanted: NDArray[np.float64]) -> float:
    """Share of elements that are not the same number; NaN equals NaN."""
    if out.shape != wanted.shape:
        return float("inf")
    return 1.0 - float(np.isclose(out, wanted, 0.0, 0.0, equal_nan=True).mean())
