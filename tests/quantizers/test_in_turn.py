"""Rows that make up for each other, against float64 that solves for all rows left at once."""

import ml_dtypes
import numpy as np

from pippin.model.quantized import dequantize
from pippin.quantizers import Codes, Grid, load_quantizer
from pippin.quantizers.hessian import Hessian
from pippin.quantizers.in_turn import _DAMPING, _ROWS, InTurn

BF16 = np.dtype(ml_dtypes.bfloat16)
GRID = Grid(bits=4, group_size=32, symmetric=True)
ROWS, INPUTS = 2 * _ROWS + 20, 64


def _moment(size: int, seed: int) -> np.ndarray:
    """Of values that have much in common."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((900, size)) + rng.standard_normal((900, 9)) @ rng.standard_normal(
        (9, size)
    )
    return (x.T @ x).astype(np.float32)


def _weight() -> np.ndarray:
    return (np.random.default_rng(0).standard_t(4, (ROWS, INPUTS)) * 0.02).astype(np.float32)


def _damped(moment: np.ndarray) -> np.ndarray:
    matrix = moment.astype(np.float64)
    return matrix / np.diag(matrix).mean() + _DAMPING * np.eye(len(matrix))


def _dense(codes: Codes) -> np.ndarray:
    return dequantize(codes.codes_OI, codes.scales_OG, codes.biases_OG)


def test_a_block_takes_up_what_is_best_for_all_rows_left() -> None:
    """The minimum of tr(G E E^T) over the rows from the block on, those before being given."""
    weight, outputs, plain = _weight(), _moment(ROWS, 1), load_quantizer("rtn")
    found = InTurn(plain, outputs).quantize(weight, GRID, BF16)
    matrix = _damped(outputs)
    order = np.argsort(-np.diag(matrix), kind="stable")
    error = np.zeros((ROWS, INPUTS))
    for start in range(0, ROWS, _ROWS):
        done, left = order[:start], order[start:]
        pull = matrix[np.ix_(left, done)] @ error[done]
        best = -np.linalg.solve(matrix[np.ix_(left, left)], pull)[:_ROWS]
        rows = left[:_ROWS]
        codes = plain.quantize((weight[rows] + best).astype(np.float32), GRID, BF16)
        same = codes.codes_OI == found.codes_OI[rows]
        assert same.mean() > 0.995  # a weight on the edge falls to either side in float32
        error[rows] = _dense(found)[rows].astype(np.float64) - weight[rows]


def test_predictions_lose_less() -> None:
    weight, best = _weight(), load_quantizer("best")
    inputs, outputs = _moment(INPUTS, 2), _moment(ROWS, 1)
    hessian = Hessian(inputs)
    costs = []
    for method in (best, InTurn(best, outputs)):
        away = _dense(method.quantize(weight, GRID, BF16, hessian)).astype(np.float64) - weight
        costs.append(np.einsum("oi,oi->", outputs @ away @ inputs, away))
    assert costs[1] < 0.8 * costs[0]


def test_outputs_without_anything_in_common_change_nothing() -> None:
    weight, best, hessian = _weight(), load_quantizer("best"), Hessian(_moment(INPUTS, 2))
    alone = best.quantize(weight, GRID, BF16, hessian)
    together = InTurn(best, np.eye(ROWS, dtype=np.float32)).quantize(weight, GRID, BF16, hessian)
    assert (_dense(alone) == _dense(together)).mean() > 0.99
