"""What every probe needs: operands on MLX's default device, the same numbers exactly, the gap."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from pippin.check import Case, Fallback, Probe, Shapes

FLOATS = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
# Largest error, relative to the largest value, that rounding explains.
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
CPU = 'compute on the CPU: model.device = "cpu"'
FLOAT32 = 'compute in float32: model.dtype = "float32"'


def draw(*shape: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> mx.array:
    """Normal numbers, the same on every device."""
    return put(np.random.default_rng(seed).standard_normal(shape), dtype)


def put(values: Any, dtype: mx.Dtype = mx.float32) -> mx.array:
    """On the device."""
    return mx.array(np.asarray(values, np.float32)).astype(dtype)


def exact(array: Any) -> NDArray[np.float64]:
    """The same numbers in float64 on the host."""
    if isinstance(array, mx.array):
        array = array.astype(mx.float32) if array.dtype == mx.bfloat16 else array
        return np.array(array).astype(np.float64)
    return np.asarray(array, np.float64)


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
    """`measure(shapes, dtype)` as one probe a dtype; `measure(shapes)` where there are none.

    A dtype's tolerance is taken `factor` times where long sums in that dtype are MLX's way.
    """

    name: str
    measure: Callable[..., Iterator[Case]]
    dtypes: tuple[str, ...] = tuple(FLOATS)
    tolerance: float | None = None
    factor: float = 1.0
    remedy: str = CPU
    avoid: Fallback = "device"

    def probes(self, shapes: Shapes) -> Iterator[Probe]:
        """The probes, by name: `name.dtype`, or `name`."""
        if not self.dtypes:
            assert self.tolerance is not None
            yield self._probe(self.name, self.tolerance, functools.partial(self.measure, shapes))
        for name in self.dtypes:
            own = self.factor * TOLERANCE[name]
            tolerance = own if self.tolerance is None else self.tolerance
            cases = functools.partial(self.measure, shapes, FLOATS[name])
            yield self._probe(f"{self.name}.{name}", tolerance, cases)

    def _probe(self, name: str, tolerance: float, cases: Callable[[], Iterator[Case]]) -> Probe:
        return Probe(
            name=name, tolerance=tolerance, cases=cases, remedy=self.remedy, avoid=self.avoid
        )
