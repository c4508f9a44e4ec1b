"""Codes that make up for each other's errors: GPTQ's rounding (https://arxiv.org/abs/2210.17323).

It lowers E H E^T of the weights' error E for a Hessian H of the inputs: weightiest inputs first, on
grids fixed beforehand, so that groups stay whole in memory.

Shape letters: O output features, I input features, G groups, N a block's inputs.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pippin.quantizers.groups import Grids
from pippin.quantizers.hessian import Hessian

Floats = NDArray[np.float32]
# Inputs rounded one after the other before their errors reach all the others in one product.
_BLOCK = 32


class Rounding:
    """The codes of some rows while they are being chosen, inputs first and in the Hessian's order.

    `weight_IO`, `error_IO` (what is taken minus the weight) and `codes_IO` are float32.
    """

    def __init__(self, weight_OI: NDArray[Any], grids: Grids, bits: int, hessian: Hessian) -> None:
        self.order_I, self.hessian, self.bits = hessian.order, hessian, bits
        self.weight_IO = np.ascontiguousarray(weight_OI.T[self.order_I], np.float32)
        self.error_IO = np.zeros_like(self.weight_IO)
        self.codes_IO = np.zeros_like(self.weight_IO)
        self.group_I = self.order_I // (weight_OI.shape[1] // grids[0].shape[1])
        self.scales_GO, self.biases_GO = (np.ascontiguousarray(part.T) for part in grids)
        self.steps_GO = 1 / self.scales_GO

    def gptq(self) -> None:
        """Round all inputs; each takes up what the ones before it left."""
        feedback_II, error_IO = self.hessian.feedback, self.error_IO
        for start in range(0, len(self.weight_IO), _BLOCK):
            block = slice(start, min(start + _BLOCK, len(self.weight_IO)))
            wanted_NO = self.weight_IO[block] - feedback_II[block, :start] @ error_IO[:start]
            for i in range(block.start, block.stop):
                wanted_O = wanted_NO[i - start]
                if i > start:
                    wanted_O -= _mix(feedback_II[i, start:i], error_IO[start:i])
                self.choose(i, wanted_O)

    def choose(self, i: int, wanted_O: Floats) -> None:
        """The nearest codes to what is wanted of one input."""
        group, codes_O, error_O = self.group_I[i], self.codes_IO[i], self.error_IO[i]
        np.subtract(wanted_O, self.biases_GO[group], out=codes_O)
        codes_O *= self.steps_GO[group]
        np.rint(codes_O, out=codes_O)
        np.maximum(codes_O, 0, out=codes_O)
        np.minimum(codes_O, 2**self.bits - 1, out=codes_O)
        np.multiply(codes_O, self.scales_GO[group], out=error_O)
        error_O += self.biases_GO[group]
        error_O -= self.weight_IO[i]

    def codes(self) -> Floats:
        """The codes in the inputs' own order."""
        codes_OI = np.empty(self.codes_IO.shape[::-1], np.float32)
        codes_OI[:, self.order_I] = self.codes_IO.T
        return codes_OI


def _mix(shares_N: Floats, rows_NO: Floats) -> Floats:
    """The sum of rows by shares. No matrix product: BLAS would wake its threads for a few rows."""
    return np.einsum("n,no->o", shares_N, rows_NO)
