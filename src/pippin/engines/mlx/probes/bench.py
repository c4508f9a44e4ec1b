"""What every probe needs: operands on MLX's default device, the same numbers exactly, the gap."""

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from pippin.check import families

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


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
    return families.gap(exact(out), exact(wanted))


def unequal(out: Any, wanted: Any) -> float:
    """Share of elements that are not the same number; NaN equals NaN."""
    return families.unequal(exact(out), exact(wanted))
