"""What every probe needs: operands on the device, the same numbers exactly, and the gap between.

References are computed by numpy in float64, whatever the device.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax import Array
from numpy.typing import NDArray

from pippin.check import Case, Fallback, Probe, Shapes

DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "int32": np.int32,
    "int8": np.int8,
    "uint8": np.uint8,
}
FLOATS = ("float32", "float16", "bfloat16")
# Largest error, relative to the largest value, that rounding explains.
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
CPU = 'compute on the CPU: model.device = "cpu"'


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """The device under test and the sizes the work will have."""

    device: jax.Device
    shapes: Shapes

    def draw(self, dtype: str, *shape: int, seed: int = 0) -> Array:
        """Normal numbers, or whole ones of -50 to 50 (0 to 50), the same on every device."""
        rng = np.random.default_rng(seed)
        if dtype in FLOATS:
            return self.put(rng.normal(size=shape), dtype)
        return self.put(rng.integers(0 if dtype == "uint8" else -50, 51, shape), dtype)

    def put(self, array: Any, dtype: str) -> Array:
        """On the device."""
        return jax.device_put(np.asarray(array).astype(DTYPES[dtype]), self.device)


def exact(array: Any) -> NDArray[np.float64]:
    """The same numbers in float64 on the host."""
    return np.asarray(array).astype(np.float64)


def gap(out: Any, wanted: Any) -> float:
    """Largest difference as a share of the largest value wanted; infinite for another shape."""
    out, wanted = exact(out), exact(wanted)
    if out.shape != wanted.shape:
        return float("inf")
    return float(np.abs(out - wanted).max() / max(np.abs(wanted).max(), 1e-30))


def unequal(out: Any, wanted: Any) -> float:
    """Share of elements that are not the same number; NaN equals NaN."""
    out, wanted = exact(out), exact(wanted)
    if out.shape != wanted.shape:
        return float("inf")
    return 1.0 - float(np.isclose(out, wanted, 0.0, 0.0, equal_nan=True).mean())


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Probes that differ by dtype alone: `name.dtype`, each with that dtype's tolerance.

    `measure(bench, dtype)` yields the cases; `tolerance` is for what must be exact.
    """

    name: str
    measure: Callable[[Bench, str], Iterator[Case]]
    dtypes: tuple[str, ...] = FLOATS
    tolerance: float | None = None
    remedy: str = CPU
    avoid: Fallback = "device"

    def probes(self, bench: Bench) -> Iterator[Probe]:
        """One probe a dtype."""
        for dtype in self.dtypes:
            yield Probe(
                name=f"{self.name}.{dtype}",
                tolerance=TOLERANCE[dtype] if self.tolerance is None else self.tolerance,
                cases=functools.partial(self.measure, bench, dtype),
                remedy=self.remedy,
                avoid=self.avoid,
            )
