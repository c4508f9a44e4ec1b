"""Searched grids, GPTQ's rounding and refits against float64 written another way."""

import ml_dtypes
import numpy as np
import pytest

from pippin.model.quantized import BITS, dequantize
from pippin.quantizers import CALIBRATED, QUANTIZERS, Codes, Grid, load_quantizer
from pippin.quantizers.groups import in_groups
from pippin.quantizers.hessian import DAMPING, Hessian
from pippin.quantizers.refit import Terms, refit
from pippin.quantizers.rounding import Rounding
from pippin.quantizers.rtn import plain_grids
from pippin.quantizers.search import search_grids

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)
ROWS, INPUTS = 6, 128
GRIDS = [
    Grid(bits=4, group_size=32, symmetric=True),
    Grid(bits=4, group_size=64, symmetric=False),
    Grid(bits=3, group_size=32, symmetric=False),
    Grid(bits=8, group_size=64, symmetric=True, per_channel=True),
]
IDS = ["symmetric", "affine", "3 bits", "per channel"]
grids_of_all_kinds = pytest.mark.parametrize("grid", GRIDS, ids=IDS)
calibrated = pytest.mark.parametrize("method", sorted(CALIBRATED))


def _weight(rows: int = ROWS, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_t(4, (rows, INPUTS)) * 0.02).astype(np.float32)


def _moment(tokens: int = 300, seed: int = 1) -> np.ndarray:
    """Correlated inputs, some of them a hundred times as large as others."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, 40)) @ rng.standard_normal((40, INPUTS))
    x = (x + rng.standard_normal((tokens, INPUTS))) * np.exp(rng.normal(0, 1.2, INPUTS))
    return (x.T @ x).astype(np.float32)


def _damped(moment: np.ndarray) -> np.ndarray:
    matrix = moment.astype(np.float64)
    return matrix / np.diag(matrix).mean() + DAMPING * np.eye(len(matrix))


def _error(weight: np.ndarray, codes: Codes, matrix: np.ndarray) -> float:
    dense = dequantize(codes.codes_OI, codes.scales_OG, codes.biases_OG)
    away = dense.astype(np.float64) - weight
    return float(((away @ matrix) * away).sum())


def _by_input(part: np.ndarray) -> np.ndarray:
    return np.repeat(part.astype(np.float64), INPUTS // part.shape[1], axis=1)


def _brute_gptq(
    weight: np.ndarray, scales: np.ndarray, biases: np.ndarray, bits: int, matrix: np.ndarray
) -> np.ndarray:
    """One input after the other, each time from the inverse over those that are left."""
    order = np.argsort(-np.diag(matrix), kind="stable")
    scales, biases = _by_input(scales), _by_input(biases)
    left, codes = weight.astype(np.float64), np.zeros(weight.shape, np.uint8)
    for place, i in enumerate(order):
        inverse = np.linalg.inv(matrix[np.ix_(order[place:], order[place:])])
        code = np.clip(np.rint((left[:, i] - biases[:, i]) / scales[:, i]), 0, 2**bits - 1)
        away = left[:, i] - (code * scales[:, i] + biases[:, i])
        left[:, order[place:]] -= np.outer(away / inverse[0, 0], inverse[0])
        codes[:, i] = code
    return codes


@grids_of_all_kinds
def test_gptq_equals_brute_force(grid: Grid) -> None:
    weight, moment = _weight(), _moment()
    codes = load_quantizer("gptq").quantize(weight, grid, BF16, Hessian(moment))
    wanted = _brute_gptq(weight, codes.scales_OG, codes.biases_OG, grid.bits, _damped(moment))
    np.testing.assert_array_equal(codes.codes_OI, wanted)
    plain = load_quantizer("rtn").quantize(weight, grid, BF16)
    np.testing.assert_array_equal(codes.scales_OG, plain.scales_OG)
    if grid.bits < 8:
        matrix = _damped(moment)
        assert _error(weight, codes, matrix) < 0.6 * _error(weight, plain, matrix)


@grids_of_all_kinds
def test_refit_equals_least_squares(grid: Grid) -> None:
    weight, moment = _weight(), _moment()
    hessian = Hessian(moment)
    start = plain_grids(in_groups(weight, grid), grid, F32)
    rounding = Rounding(weight, start, grid.bits, hessian)
    rounding.gptq()
    codes = rounding.codes()
    terms = Terms(grid=grid, dtype=F32, hessian=hessian)
    scales, biases = refit(weight, codes, start, terms)
    root = np.linalg.cholesky(_damped(moment)).T
    groups = scales.shape[1]
    member = np.repeat(np.eye(groups), INPUTS // groups, axis=0)
    half = 2 ** (grid.bits - 1)
    for row in range(ROWS):
        basis = (codes[row].astype(np.float64) - half)[:, None] * member
        if not grid.symmetric:
            basis = np.concatenate([basis, member], axis=1)
        wanted = np.linalg.lstsq(root @ basis, root @ weight[row].astype(np.float64), rcond=None)[0]
        np.testing.assert_allclose(scales[row], wanted[:groups], rtol=2e-3)
        if not grid.symmetric:
            middle = biases[row] + half * scales[row]
            np.testing.assert_allclose(middle, wanted[groups:], rtol=2e-3, atol=2e-5)


@grids_of_all_kinds
def test_searched_grid_is_never_worse_than_plain(grid: Grid) -> None:
    groups = in_groups(_weight(rows=64), grid)
    weights = np.exp(np.random.default_rng(2).normal(0, 1, groups.shape[1:])).astype(np.float32)
    errors = {}
    for name, (scales, biases) in {
        "plain": plain_grids(groups, grid, BF16),
        "searched": search_grids(groups, grid, BF16, weights),
    }.items():
        steps = (groups.astype(np.float64) - biases[..., None]) / scales[..., None]
        codes = np.clip(np.rint(steps), 0, 2**grid.bits - 1)
        away = codes * scales[..., None] + biases[..., None] - groups
        errors[name] = (away * away * weights).sum(-1)
    assert (errors["searched"] <= errors["plain"] * (1 + 1e-4)).all()
    if grid.bits < 8:
        assert errors["searched"].sum() < 0.9 * errors["plain"].sum()


def test_searched_symmetric_grid_is_near_the_best_of_a_thousand() -> None:
    grid = GRIDS[0]
    groups = in_groups(_weight(rows=32), grid)
    weights = np.exp(np.random.default_rng(2).normal(0, 1, groups.shape[1:])).astype(np.float32)
    scales, _ = search_grids(groups, grid, F32, weights)

    def error(scale: np.ndarray) -> np.ndarray:
        away = np.clip(np.rint(groups / scale[..., None]), -8, 7) * scale[..., None] - groups
        return (away.astype(np.float64) ** 2 * weights).sum(-1)

    largest = np.abs(groups).max(-1)
    best = np.min([error(largest * share / 7) for share in np.linspace(0.3, 1.1, 1000)], axis=0)
    assert error(scales).sum() < 1.03 * best.sum()


@grids_of_all_kinds
def test_best_moves_the_outputs_less_than_nearest_codes(grid: Grid) -> None:
    weight, moment = _weight(), _moment()
    hessian, matrix = Hessian(moment), _damped(moment)
    errors = {
        method: _error(weight, load_quantizer(method).quantize(weight, grid, BF16, hessian), matrix)
        for method in QUANTIZERS
    }
    assert errors["best"] < 0.6 * min(errors["rtn"], errors["mse"])


@pytest.mark.parametrize("method", QUANTIZERS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_codes_and_grids_are_what_the_layout_holds(method: str, bits: int, symmetric: bool) -> None:
    grid = Grid(bits=bits, group_size=32, symmetric=symmetric)
    codes = load_quantizer(method).quantize(_weight(), grid, BF16, Hessian(_moment()))
    assert codes.codes_OI.dtype == np.uint8
    assert codes.codes_OI.max() < 2**bits
    assert codes.scales_OG.dtype == codes.biases_OG.dtype == BF16
    assert codes.scales_OG.shape == codes.biases_OG.shape == (ROWS, INPUTS // 32)
    scales = codes.scales_OG.astype(np.float64)
    assert (scales > 0).all()
    if symmetric:
        half = 2.0 ** (bits - 1)
        np.testing.assert_array_equal(codes.biases_OG.astype(np.float64), -half * scales)


@pytest.mark.parametrize("method", QUANTIZERS)
def test_per_channel_repeats_one_scale(method: str) -> None:
    grid = Grid(bits=4, group_size=32, symmetric=True, per_channel=True)
    codes = load_quantizer(method).quantize(_weight(), grid, BF16, Hessian(_moment()))
    scales = codes.scales_OG.astype(np.float32)
    np.testing.assert_array_equal(scales, np.repeat(scales[:, :1], INPUTS // 32, axis=1))


@calibrated
def test_rows_do_not_depend_on_each_other(method: str) -> None:
    weight, grid = _weight(rows=40), GRIDS[0]
    whole = load_quantizer(method).quantize(weight, grid, BF16, Hessian(_moment()))
    again = load_quantizer(method).quantize(weight, grid, BF16, Hessian(_moment()))
    np.testing.assert_array_equal(whole.codes_OI, again.codes_OI)
    part = load_quantizer(method).quantize(weight[10:20], grid, BF16, Hessian(_moment()))
    # Products of other sizes round otherwise in the last bit: a code on an edge may fall.
    assert (whole.codes_OI[10:20] == part.codes_OI).mean() > 0.99


@calibrated
@pytest.mark.parametrize("kind", ["zero", "dead inputs", "singular", "tiny", "not quite positive"])
def test_hessians_of_few_inputs(method: str, kind: str) -> None:
    """Fewer tokens than inputs, inputs that are always zero, or none seen at all."""
    moment = {
        "zero": np.zeros((INPUTS, INPUTS), np.float32),
        "dead inputs": _moment() * np.outer(np.arange(INPUTS) % 3 > 0, np.arange(INPUTS) % 3 > 0),
        "singular": _moment(tokens=3),
        "tiny": _moment() * np.float32(1e-30),
        "not quite positive": _moment() - 1e-2 * np.trace(_moment()) * np.eye(INPUTS),
    }[kind].astype(np.float32)
    weight = _weight()
    for grid in GRIDS[:2]:
        codes = load_quantizer(method).quantize(weight, grid, BF16, Hessian(moment))
        dense = dequantize(codes.codes_OI, codes.scales_OG, codes.biases_OG)
        assert np.isfinite(dense).all()
        if kind == "zero":
            plain = load_quantizer(CALIBRATED[method].without).quantize(weight, grid, BF16)
            identity = np.eye(INPUTS)
            assert _error(weight, codes, identity) <= 1.001 * _error(weight, plain, identity)


@calibrated
def test_a_group_of_zeros_stays_zero(method: str) -> None:
    weight = _weight()
    weight[:, 32:64] = 0
    codes = load_quantizer(method).quantize(weight, GRIDS[0], BF16, Hessian(_moment()))
    dense = dequantize(codes.codes_OI, codes.scales_OG, codes.biases_OG)
    assert np.isfinite(dense).all()
    assert np.abs(dense[:, 32:64]).max() < 1e-3


def test_output_error_is_that_of_the_inputs() -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((500, INPUTS)).astype(np.float32) * 3
    weight = _weight()
    wanted = np.square(x.astype(np.float64) @ weight.T).sum()
    found = Hessian(x.T @ x).output_error(weight)
    assert found == pytest.approx(wanted, rel=1e-4)


def test_feedback_of_many_inputs_factors_the_hessian() -> None:
    """More than are factored at once: H = R R^T by the order of rounding, R upper triangular."""
    x = np.random.default_rng(0).standard_normal((900, 700)).astype(np.float32)
    hessian = Hessian(x.T @ x)
    ordered = hessian.matrix_II[np.ix_(hessian.order, hessian.order)].astype(np.float64)
    r = np.linalg.cholesky(ordered[::-1, ::-1])[::-1, ::-1]
    np.testing.assert_allclose(hessian.feedback, (r / r.diagonal()).T, rtol=1e-5, atol=1e-7)
