"""X^T X of a linear's inputs, made ready once for every linear that reads them.

An error E of the weights moves the outputs by X E^T, so E X^T X E^T is what rounding should keep
small. A share of the mean diagonal is added to every diagonal element (damping): inputs that were
never seen still weigh something, and the matrix can be factored.

Shape letters: O output features, I input features, B a block's inputs, S outputs of a span.
"""

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

DAMPING = 0.01
# Rows and columns that are factored at once.
_BLOCK = 128


class Hessian:
    """X^T X scaled to a mean diagonal of one and damped. What is derived from it is kept."""

    def __init__(
        self,
        moment_II: NDArray[np.float32],
        damping: float = DAMPING,
        outputs_OS: NDArray[np.float32] | None = None,
    ) -> None:
        """`moment_II` (I, I) is finite and symmetric; all zero (no input seen) counts as identity.

        `mean` is its mean diagonal, `matrix_II` (I, I) float32 what it became. `outputs_OS` are the
        moments of the outputs beside them, see in_turn.py.
        """
        self.outputs_OS = outputs_OS
        self.mean = float(np.trace(moment_II, dtype=np.float64)) / len(moment_II)
        self.damping = damping if self.mean > 0 else 1.0
        mean = np.float32(self.mean if self.mean > 0 else 1.0)
        self.matrix_II: NDArray[np.float32] = np.divide(moment_II, mean, dtype=np.float32)
        self.matrix_II[np.diag_indices_from(self.matrix_II)] += np.float32(self.damping)

    @cached_property
    def importance(self) -> NDArray[np.float32]:
        """(I,) What an input weighs by itself: the diagonal, never zero."""
        return np.diagonal(self.matrix_II).astype(np.float32)

    @cached_property
    def order(self) -> NDArray[np.intp]:
        """(I,) Inputs, the weightiest first: what is rounded early can still be made up for."""
        return np.argsort(-self.importance, kind="stable")

    @cached_property
    def feedback(self) -> NDArray[np.float32]:
        """(I, I) Row i: how much of the errors of inputs before i (in `order`) input i takes up.

        With H = R R^T, R upper triangular, that is R[:i, i] / R[i, i]. GPTQ takes the same factors
        from the inverse of H (QuIP, https://arxiv.org/abs/2307.13304, theorem 6); this way around
        nothing is inverted.
        """
        turned = self.order[::-1]
        upper_II = _cholesky(self.matrix_II, turned)
        for start in range(0, len(upper_II), _BLOCK):
            block = slice(start, start + _BLOCK)
            upper_II[block] /= upper_II.diagonal()[block, None].copy()
        return upper_II[::-1, ::-1]

    def of_inputs_over(self, scale_I: NDArray[np.float32]) -> "Hessian":
        """That of the same inputs, each divided by its scale (I,)."""
        moment_II = self.matrix_II.copy()
        moment_II[np.diag_indices_from(moment_II)] -= np.float32(self.damping)
        moment_II *= np.float32(self.mean)
        return Hessian(np.divide(moment_II, np.outer(scale_I, scale_I), dtype=np.float32))

    def output_error(self, error_OI: NDArray[np.float32]) -> float:
        """||X E^T||^2 over the inputs seen, without the damping, in the moment's own units."""
        moved_OI = error_OI @ self.matrix_II
        moved_OI -= np.float32(self.damping) * error_OI
        return self.mean * float(np.einsum("oi,oi->", moved_OI, error_OI, dtype=np.float64))


def _cholesky(matrix_II: NDArray[np.float32], order_I: NDArray[np.intp]) -> NDArray[np.float32]:
    """The upper factor; more damping where rounding of the moments left a negative eigenvalue."""
    extra = 0.0
    while True:
        upper_II = matrix_II[np.ix_(order_I, order_I)]
        upper_II[np.diag_indices_from(upper_II)] += np.float32(extra)
        try:
            _factor(upper_II)
        except np.linalg.LinAlgError:
            extra = max(10 * extra, DAMPING)
        else:
            return upper_II


def _factor(upper_II: NDArray[np.float32]) -> None:
    """Cholesky's factor in the matrix's own place, by rows: numpy would hold float64 three times.

    Sums are float64, a block of rows at a time; only what is kept is rounded.
    """
    for start in range(0, len(upper_II), _BLOCK):
        own = slice(start, start + _BLOCK)
        rows_BI = upper_II[own, start:].astype(np.float64)
        for first in range(0, start, _BLOCK):
            done_BI = upper_II[first : first + _BLOCK, start:].astype(np.float64)
            rows_BI -= done_BI[:, : len(rows_BI)].T @ done_BI
        lower_BB = np.linalg.cholesky(rows_BI[:, : len(rows_BI)])
        upper_II[own, start:] = np.linalg.solve(lower_BB, rows_BI)
        upper_II[own, :start] = 0
