"""The best that is known here: grids searched by importance, GPTQ's rounding on them, a refit.

The grids matter beyond the output error they leave: plain ones end with less of it, and with a
higher divergence of the model.

Shape letters: O output features, I input features, G groups, S weights that share a scale.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pippin.quantizers import Codes, Grid, Quantizer
from pippin.quantizers.groups import finish, in_groups
from pippin.quantizers.hessian import Hessian
from pippin.quantizers.refit import Terms, refit
from pippin.quantizers.rounding import Rounding
from pippin.quantizers.search import search_grids


class Best:
    """Importance is the diagonal of the Hessian; rounding and refit see all of it."""

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
        weight_OI = groups_OGS.reshape(weight_OI.shape)
        weights_GS = hessian.importance.reshape(groups_OGS.shape[1:])
        grids = search_grids(groups_OGS, grid, dtype, weights_GS)
        terms = Terms(grid=grid, dtype=dtype, hessian=hessian)
        rounding = Rounding(weight_OI, grids, grid.bits, hessian)
        rounding.gptq()
        codes_OI = rounding.codes()
        grids = refit(weight_OI, codes_OI, grids, terms)
        return finish(codes_OI.reshape(groups_OGS.shape), grids, grid, dtype)


def make_quantizer() -> Quantizer:
    """The method's entry in the table."""
    return Best()
