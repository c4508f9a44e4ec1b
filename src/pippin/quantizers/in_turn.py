"""Rows rounded in turn: each block takes up what the blocks before it left of the predictions.

The cost of an error E of a weight is near tr(G E H E^T): H is what its inputs weigh, G what its
outputs do to the predictions (https://arxiv.org/abs/2505.22988). Where G is not diagonal, one row's
error can be made up for by another's. Given the errors of the rows before, what is best for a block
does not depend on H: the same factors as over inputs, applied to rows.

Shape letters: O output features, I input features, R rows of a block, S outputs of a span.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pippin.memory import SPAN
from pippin.model.quantized import dequantize
from pippin.quantizers import Codes, Grid, Quantizer
from pippin.quantizers.hessian import Hessian

# Rows that are rounded at once. A quarter of it gains 1 % and takes three times as long.
_ROWS = 64
# Gradients of drawn predictions say less about outputs than inputs say about themselves.
_DAMPING = 0.03


def spans(outputs: int) -> list[slice]:
    """The outputs in parts of equal length, but for the last, that make up for each other.

    Not all of them at once: their moments grow with the square.
    """
    parts = -(-outputs // SPAN)
    length = -(-outputs // parts)
    return [slice(start, min(start + length, outputs)) for start in range(0, outputs, length)]


def outputs_of(linear: str) -> str:
    """The name under which moments of a linear's outputs stand beside those of its inputs.

    They are (O, S): every span of outputs has its own square, on the left.
    """
    return f"{linear}:outputs"


class InTurn:
    """A method that rounds under a Hessian, block by block; `moment_OO` is of a span's outputs."""

    def __init__(self, method: Quantizer, moment_OO: NDArray[np.float32]) -> None:
        outputs = Hessian(moment_OO, _DAMPING)
        self.method, self.order_O, self.feedback_OO = method, outputs.order, outputs.feedback

    def quantize(
        self,
        weight_OI: NDArray[Any],
        grid: Grid,
        dtype: np.dtype[Any],
        hessian: Hessian | None = None,
    ) -> Codes:
        """Codes of all rows of the span, in their own order."""
        weight_OI = weight_OI[self.order_O].astype(np.float32, copy=False)
        error_OI, blocks = np.zeros_like(weight_OI), list[Codes]()
        for start in range(0, len(weight_OI), _ROWS):
            block = slice(start, min(start + _ROWS, len(weight_OI)))
            wanted_RI = weight_OI[block] - self._left(block, error_OI)
            codes = self.method.quantize(wanted_RI, grid, dtype, hessian)
            error_OI[block] = dequantize(codes.codes_OI, codes.scales_OG, codes.biases_OG)
            error_OI[block] -= weight_OI[block]
            blocks.append(codes)
        own = np.argsort(self.order_O)
        return Codes(
            codes_OI=np.concatenate([codes.codes_OI for codes in blocks])[own],
            scales_OG=np.concatenate([codes.scales_OG for codes in blocks])[own],
            biases_OG=np.concatenate([codes.biases_OG for codes in blocks])[own],
        )

    def _left(self, block: slice, error_OI: NDArray[np.float32]) -> NDArray[np.float32]:
        """(R, I) What the errors before the block leave it to take up."""
        left_RI = self.feedback_OO[block, : block.start] @ error_OI[: block.start]
        own_RR = np.tril(self.feedback_OO[block, block], -1)
        own_RR[np.diag_indices_from(own_RR)] = 1
        return np.linalg.solve(own_RR, left_RI)
