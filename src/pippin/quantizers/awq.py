"""AWQ: what reads large inputs is scaled up before plain rounding, and its inputs scaled down.

A linear computes (W s)(x / s): rounding W s errs less on inputs with a large s
(https://arxiv.org/abs/2306.00978). Here s is a power of the inputs' root mean square, the power
that leaves the least output error; dividing x is left to what makes it (see stages/folding.py).
Then every group's range is cut by the share that leaves the least error of its own outputs.

Shape letters: O output features, I input features, R some rows, G groups, S weights that share a
scale.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pippin.model.quantized import dequantize
from pippin.quantizers import Codes, Grid, Quantizer
from pippin.quantizers.groups import Grids, in_groups, nearest, nearest_codes, shared
from pippin.quantizers.hessian import Hessian
from pippin.quantizers.nested import nest
from pippin.quantizers.rtn import Rtn, plain_grids

# Powers that are tried; zero leaves the weights as they are.
POWERS = tuple(i / 10 for i in range(11))
# Shares of a group's range that are tried.
SHARES = tuple(1 - i / 20 for i in range(10))


@dataclass(frozen=True, kw_only=True, slots=True)
class Folding:
    """By tensor: `inputs` its columns are multiplied with, `outputs` its rows are divided by."""

    inputs: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    outputs: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    def apply(self, name: str, start: int, rows: NDArray[Any]) -> NDArray[Any]:
        """Rows of a tensor from `start` on, as they are to be stored; float32 if folded."""
        if name in self.inputs:
            rows = rows.astype(np.float32) * self.inputs[name]
        if name in self.outputs:
            scale_R = self.outputs[name][start : start + len(rows)]
            rows = rows.astype(np.float32) / scale_R.reshape(-1, *[1] * (rows.ndim - 1))
        return rows


class Awq:
    """Rounds weights that come scaled, under the Hessian of their scaled inputs."""

    def quantize(
        self,
        weight_OI: NDArray[Any],
        grid: Grid,
        dtype: np.dtype[Any],
        hessian: Hessian | None = None,
    ) -> Codes:
        """Codes uint8 (O, I); scales, biases (O, G), rounded to `dtype` before codes are chosen."""
        assert hessian is not None, "calibrated"
        groups_OGS = in_groups(weight_OI, grid)
        grids = clipped_grids(groups_OGS, grid, dtype, hessian)
        return nearest_codes(groups_OGS, grids, grid, dtype)


def make_quantizer() -> Quantizer:
    """The method's entry in the table."""
    return Awq()


def clipped_grids(
    groups_OGS: NDArray[np.float32], grid: Grid, dtype: np.dtype[Any], hessian: Hessian
) -> Grids:
    """Plain grids of a share of each group's range: the share with the least output error."""
    blocks_GSS = _blocks(hessian.matrix_II, shared(grid, len(hessian.matrix_II)))
    low_OG1, high_OG1 = (end(groups_OGS, axis=-1, keepdims=True) for end in (np.min, np.max))
    best = plain_grids(groups_OGS, grid, dtype)
    least_OG = np.full(best[0].shape, np.inf, np.float32)
    for share in SHARES:
        grids = plain_grids(np.clip(groups_OGS, share * low_OG1, share * high_OG1), grid, dtype)
        away_OGS = nearest(groups_OGS, grids, grid.bits)
        away_OGS *= grids[0][..., None]
        away_OGS += grids[1][..., None]
        away_OGS -= groups_OGS
        moved_OGS = (away_OGS.swapaxes(0, 1) @ blocks_GSS).swapaxes(0, 1)
        error_OG = np.einsum("ogs,ogs->og", moved_OGS, away_OGS)
        better_OG = error_OG < least_OG
        least_OG = np.minimum(error_OG, least_OG)
        best = np.where(better_OG, grids[0], best[0]), np.where(better_OG, grids[1], best[1])
    return nest(best, grid)


def _blocks(matrix_II: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """(G, S, S) Each group's inputs among themselves."""
    starts = range(0, len(matrix_II), size)
    return np.stack([matrix_II[i : i + size, i : i + size] for i in starts])


def find_scale(
    weights: Sequence[tuple[NDArray[np.float32], Grid]], dtype: np.dtype[Any], hessian: Hessian
) -> NDArray[np.float32]:
    """s (I,) float32, positive, for linears (weight (O, I), grid) that read the same inputs."""
    tried = [power_scale(hessian, power) for power in POWERS]
    errors = [sum(scaled_error(*w, dtype, hessian, scale_I) for w in weights) for scale_I in tried]
    return tried[int(np.argmin(errors))]


def power_scale(hessian: Hessian, power: float) -> NDArray[np.float32]:
    """Powers of the inputs' size, the least and the largest equally far from one."""
    scale_I = np.sqrt(hessian.importance) ** np.float32(power)
    return scale_I / np.sqrt(scale_I.max() * scale_I.min())


def scaled_error(
    weight_OI: NDArray[np.float32],
    grid: Grid,
    dtype: np.dtype[Any],
    hessian: Hessian,
    scale_I: NDArray[np.float32],
) -> float:
    """||X (W - W')^T||^2 where W' is what rounding leaves of W s, over s."""
    codes = Rtn().quantize(weight_OI * scale_I, grid, dtype)
    away_OI = dequantize(codes.codes_OI, codes.scales_OG, codes.biases_OG)
    away_OI /= scale_I
    away_OI -= weight_OI
    return hessian.output_error(away_OI)
