"""Searched grids, nearest codes: the least squared error of the weights; nothing is calibrated.

Shape letters: O output features, I input features, G groups, S weights that share a scale.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pippin.quantizers import Codes, Grid, Quantizer
from pippin.quantizers.groups import in_groups, nearest_codes
from pippin.quantizers.hessian import Hessian
from pippin.quantizers.search import search_grids


class Mse:
    """Never worse than plain rounding in any group."""

    def quantize(
        self,
        weight_OI: NDArray[Any],
        grid: Grid,
        dtype: np.dtype[Any],
        hessian: Hessian | None = None,
    ) -> Codes:
        """Codes uint8 (O, I); scales, biases (O, G), rounded to `dtype` before codes are chosen."""
        groups_OGS = in_groups(weight_OI, grid)
        weights_GS = np.ones(groups_OGS.shape[1:], np.float32)
        grids = search_grids(groups_OGS, grid, dtype, weights_GS)
        return nearest_codes(groups_OGS, grids, grid, dtype)


def make_quantizer() -> Quantizer:
    """The method's entry in the table."""
    return Mse()
