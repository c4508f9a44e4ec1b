"""What every probe needs: operands on the device, the same numbers exactly, and the gap between.

References are computed by numpy in float64, whatever the device.
"""

from dataclasses import dataclass
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax import Array
from numpy.typing import NDArray

from pippin.check import Shapes, families

DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "int32": np.int32,
    "int16": np.int16,
    "int8": np.int8,
    "uint32": np.uint32,
    "uint16": np.uint16,
    "uint8": np.uint8,
    "bool": np.bool_,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """The device under test and the sizes the work will have."""

    device: jax.Device
    shapes: Shapes

    def draw(self, dtype: str, *shape: int, seed: int = 0) -> Array:
        """Normal numbers, or whole ones of -50 to 50 (0 to 50; 0 and 1), alike on every device."""
        rng = np.random.default_rng(seed)
        if dtype in families.FLOATS:
            return self.put(rng.normal(size=shape), dtype)
        low, high = (0, 2) if dtype == "bool" else (-50, 51)
        return self.put(rng.integers(0 if dtype[0] == "u" else low, high, shape), dtype)

    def put(self, array: Any, dtype: str) -> Array:
        """On the device."""
        return jax.device_put(np.asarray(array).astype(DTYPES[dtype]), self.device)


def exact(array: Any) -> NDArray[np.float64]:
    """The same numbers in float64 on the host."""
    return np.asarray(array).astype(np.float64)


def gap(out: Any, wanted: Any) -> float:
    """Largest difference as a share of the largest value wanted; infinite for another shape."""
    return families.gap(exact(out), exact(wanted))


def unequal(out: Any, wanted: Any) -> float:
    """Share of elements that are not the same number; NaN equals NaN."""
    return families.unequal(exact(out), exact(wanted))
