"""Half-quadratic quantization: plain scales, and zero points moved so that outliers count less.

The weights' error is held to a norm below one, split in two: what remains of the error after
shrinking is an outlier's and let go, the zero point is the mean of the rest
(https://mobiusml.github.io/hqq_blog/). Nothing is calibrated.

Shape letters: O output features, I input features, G groups, S weights that share a scale.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pippin.quantizers import Codes, Grid, Quantizer
from pippin.quantizers.groups import Grids, in_groups, nearest, nearest_codes, round_to
from pippin.quantizers.hessian import Hessian
from pippin.quantizers.nested import nest
from pippin.quantizers.rtn import plain_grids

# The published settings: the norm, the weight of the split, its growth, and how often it is made.
NORM, WEIGHT, GROWTH, ROUNDS = 0.7, 10.0, 1.01, 20


class Hqq:
    """Affine grids; a symmetric one has no zero point to move and stays plain."""

    def quantize(
        self,
        weight_OI: NDArray[Any],
        grid: Grid,
        dtype: np.dtype[Any],
        hessian: Hessian | None = None,
    ) -> Codes:
        """Codes uint8 (O, I); scales, biases (O, G), rounded to `dtype` before codes are chosen."""
        groups_OGS = in_groups(weight_OI, grid)
        grids = plain_grids(groups_OGS, grid, dtype)
        if not grid.symmetric:
            scales_OG, biases_OG = moved(groups_OGS, grids, grid.bits)
            grids = nest((round_to(scales_OG, dtype), round_to(biases_OG, dtype)), grid)
        return nearest_codes(groups_OGS, grids, grid, dtype)


def make_quantizer() -> Quantizer:
    """The method's entry in the table."""
    return Hqq()


def moved(groups_OGS: NDArray[np.float32], grids: Grids, bits: int) -> Grids:
    """The same scales with the biases that half-quadratic rounds give.

    A group stops where a round leaves a larger mean error than the one before.
    """
    scales_OG, biases_OG = grids[0], grids[1].copy()
    best_OG, least_OG, weight = biases_OG, np.full(scales_OG.shape, np.inf, np.float32), WEIGHT
    for _ in range(ROUNDS):
        steps_OGS = nearest(groups_OGS, (scales_OG, biases_OG), bits) * scales_OG[..., None]
        away_OGS = groups_OGS - steps_OGS - biases_OG[..., None]
        error_OG = np.abs(away_OGS).mean(axis=-1)
        best_OG = np.where(error_OG < least_OG, biases_OG, best_OG)
        least_OG = np.minimum(error_OG, least_OG)
        biases_OG = (groups_OGS - _shrunk(away_OGS, weight) - steps_OGS).mean(axis=-1)
        weight *= GROWTH
    return scales_OG, best_OG


def _shrunk(away_OGS: NDArray[np.float32], weight: float) -> NDArray[np.float32]:
    """The minimiser of |x|^NORM + weight / 2 (x - away)^2, nearly: a soft threshold."""
    size_OGS = np.maximum(np.abs(away_OGS), np.finfo(np.float32).tiny)
    left_OGS = size_OGS - size_OGS ** (NORM - 1) / weight
    return np.sign(away_OGS) * np.maximum(left_OGS, 0)
