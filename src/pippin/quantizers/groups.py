"""A weight cut into the groups of its grid, and put together again as the layout stores it.

Shape letters: O output features, I input features, G groups, S weights that share a scale.
"""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pippin.quantizers import Codes, Grid, kernels

# Scales and biases (O, G), float32 that the stored dtype holds exactly.
Grids: TypeAlias = tuple[NDArray[np.float32], NDArray[np.float32]]
# A group of equal weights has no range; any scale will do, if the dtype can hold it.
MIN_SCALE = 1e-7


def shared(grid: Grid, inputs: int) -> int:
    """How many inputs of a row share a scale."""
    return inputs if grid.per_channel else grid.group_size


def as_stored(weight_OI: NDArray[Any], grid: Grid) -> NDArray[Any]:
    """(O, G, S) in the weight's own dtype; per channel there is one group."""
    rows, inputs = weight_OI.shape
    return weight_OI.reshape(rows, -1, shared(grid, inputs))


def in_groups(weight_OI: NDArray[Any], grid: Grid) -> NDArray[np.float32]:
    """The same in float32."""
    return as_stored(weight_OI, grid).astype(np.float32, copy=False)


def extremes(groups_OGS: NDArray[Any]) -> Grids:
    """The least and the largest weight of every group, each (O, G)."""
    found = kernels.extremes if kernels.fit(groups_OGS) else _extremes
    low_OG, high_OG = found(groups_OGS)
    return low_OG + 0, high_OG + 0  # of 0.0 and -0.0 either is the least


def _extremes(groups_OGS: NDArray[Any]) -> Grids:
    rows, groups, size = groups_OGS.shape
    flat, starts = groups_OGS.reshape(-1), np.arange(0, groups_OGS.size, size)
    flat = flat.astype(np.float32, copy=False)
    # Half the time of min(axis=-1), which is for longer rows.
    low, high = (least.reduceat(flat, starts) for least in (np.minimum, np.maximum))
    return low.reshape(rows, groups), high.reshape(rows, groups)


def nearest(
    groups_OGS: NDArray[np.float32], grids: Grids, bits: int, out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Every weight's nearest code, 0 to 2**bits - 1, as float32 (O, G, S), in `out` if given."""
    scales_OG, biases_OG = grids
    codes_OGS = np.subtract(groups_OGS, biases_OG[..., None], out=out)
    codes_OGS /= scales_OG[..., None]
    np.rint(codes_OGS, out=codes_OGS)
    return np.clip(codes_OGS, 0, 2**bits - 1, out=codes_OGS)


def nearest_codes(
    groups_OGS: NDArray[Any], grids: Grids, grid: Grid, dtype: np.dtype[Any]
) -> Codes:
    """The nearest codes of weights in any dtype, as `finish` has them."""
    if kernels.fit(groups_OGS):
        return finish(kernels.nearest(groups_OGS, grids, grid.bits), grids, grid, dtype)
    wide_OGS = groups_OGS.astype(np.float32, copy=False)
    return finish(nearest(wide_OGS, grids, grid.bits), grids, grid, dtype)


def finish(codes_OGS: NDArray[Any], grids: Grids, grid: Grid, dtype: np.dtype[Any]) -> Codes:
    """As the layout has it: per channel, a row's scale stands in every group of `group_size`."""
    rows, groups, size = codes_OGS.shape
    repeats = size // grid.group_size
    scales_OG, biases_OG = (np.repeat(part.astype(dtype), repeats, axis=1) for part in grids)
    with np.errstate(invalid="ignore"):  # of scales that are not finite; the caller looks
        codes_OI = codes_OGS.astype(np.uint8, copy=False).reshape(rows, groups * size)
    return Codes(codes_OI=codes_OI, scales_OG=scales_OG, biases_OG=biases_OG)


def round_to(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[np.float32]:
    """The nearest values that `dtype` holds, as float32; infinite where none is near."""
    with np.errstate(over="ignore"):
        return values.astype(dtype).astype(np.float32)


def symmetric_bias(scales_OG: NDArray[np.float32], bits: int) -> NDArray[np.float32]:
    """The bias that makes a grid symmetric: exactly -2**(bits - 1) scales, a power of two."""
    return -(2 ** (bits - 1)) * scales_OG
