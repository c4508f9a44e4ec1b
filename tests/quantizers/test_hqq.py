"""Half-quadratic rounds against float64, a group at a time, and what they are for."""

import ml_dtypes
import numpy as np

from pippin.model.quantized import dequantize
from pippin.quantizers import Grid, load_quantizer
from pippin.quantizers.groups import in_groups
from pippin.quantizers.hqq import GROWTH, NORM, ROUNDS, WEIGHT, moved
from pippin.quantizers.rtn import plain_grids

BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
GRID = Grid(bits=3, group_size=32, symmetric=False)


def _weight(rows: int = 8) -> np.ndarray:
    return (np.random.default_rng(0).standard_t(3, (rows, 64)) * 0.02).astype(np.float32)


def _one_group(values: np.ndarray, scale: float, bias: float, bits: int) -> float:
    """The published rounds with a zero point in codes, as their authors write them."""
    zero, step, weight = -bias / scale, 1 / scale, WEIGHT
    best, least = zero, np.inf
    for _ in range(ROUNDS):
        codes = np.clip(np.rint(values * step + zero), 0, 2**bits - 1)
        left = values - (codes - zero) / step
        if np.abs(left).mean() < least:
            best, least = zero, np.abs(left).mean()
        size = np.maximum(np.abs(left), 1e-30)
        kept = np.sign(left) * np.maximum(size - size ** (NORM - 1) / weight, 0)
        zero = np.mean(codes - (values - kept) * step)
        weight *= GROWTH
    return -best * scale


def test_zero_points_equal_the_published_rounds() -> None:
    groups = in_groups(_weight(), GRID)
    plain = plain_grids(groups, GRID, F32)
    scales, biases = moved(groups, plain, GRID.bits)
    np.testing.assert_array_equal(scales, plain[0])
    wanted = [
        _one_group(groups[o, g].astype(np.float64), float(scales[o, g]), float(plain[1][o, g]), 3)
        for o in range(8)
        for g in range(2)
    ]
    near = np.isclose(biases.reshape(-1), wanted, rtol=1e-4, atol=1e-7)
    assert near.mean() > 0.9  # a code on the edge falls to either side in float32
    assert (biases != plain[1]).any()


def test_the_mean_error_is_never_larger_than_plain() -> None:
    weight = _weight(64)
    errors = {}
    for method in ("hqq", "rtn"):
        codes = load_quantizer(method).quantize(weight, GRID, F32)
        away = np.abs(dequantize(codes.codes_OI, codes.scales_OG, codes.biases_OG) - weight)
        errors[method] = away.reshape(64, 2, 32).mean(-1)
    assert (errors["hqq"] <= errors["rtn"] + 1e-7).all()
    assert errors["hqq"].mean() < 0.99 * errors["rtn"].mean()


def test_symmetric_codes_stay_plain() -> None:
    grid = Grid(bits=4, group_size=32, symmetric=True)
    hqq, rtn = (load_quantizer(m).quantize(_weight(), grid, BF16) for m in ("hqq", "rtn"))
    np.testing.assert_array_equal(hqq.codes_OI, rtn.codes_OI)
