"""GPTQ: plain grids, and codes that make up for each other's errors under the inputs' Hessian.

Shape letters: O output features, I input features, G groups, S weights that share a scale.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pippin.quantizers import Codes, Grid, Quantizer
from pippin.quantizers.groups import finish, in_groups
from pippin.quantizers.hessian import Hessian
from pippin.quantizers.rounding import Rounding
from pippin.quantizers.rtn import plain_grids


class Gptq:
    """The published method, as its users know it; the weightiest inputs first."""

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
        grids = plain_grids(groups_OGS, grid, dtype)
        rounding = Rounding(weight_OI, grids, grid.bits, hessian)
        rounding.gptq()
        return finish(rounding.codes().reshape(groups_OGS.shape), grids, grid, dtype)


def make_quantizer() -> Quantizer:
    """The method's entry in the table."""
    return Gptq()
