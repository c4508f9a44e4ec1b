"""Rounding to nearest, against a float64 reference that tries every code."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pippin.model.quantized import BITS, dequantize
from pippin.quantizers import Codes, Grid, load_quantizer

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)


def _weight(seed: int = 0, rows: int = 6, inputs: int = 256) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_t(4, (rows, inputs)) * 0.02).astype(np.float32)


def _quantize(weight: np.ndarray, grid: Grid, dtype: np.dtype = BF16) -> Codes:
    return load_quantizer("rtn").quantize(weight, grid, dtype)


def _error(weight: np.ndarray, codes: Codes) -> float:
    dense = dequantize(codes.codes_OI, codes.scales_OG, codes.biases_OG)
    return float(np.linalg.norm(dense - weight) / np.linalg.norm(weight))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("symmetric", [False, True])
def test_every_code_is_the_nearest_to_the_stored_grid(
    bits: int, group_size: int, symmetric: bool
) -> None:
    weight = _weight()
    grid = Grid(bits=bits, group_size=group_size, symmetric=symmetric)
    codes = _quantize(weight, grid)
    assert codes.scales_OG.dtype == codes.biases_OG.dtype == BF16
    assert codes.scales_OG.shape == (6, 256 // group_size)
    groups = weight.astype(np.float64).reshape(6, -1, group_size)
    scales = codes.scales_OG.astype(np.float64)[..., None, None]
    biases = codes.biases_OG.astype(np.float64)[..., None, None]
    levels = np.arange(2**bits) * scales + biases
    away = np.abs(groups[..., None] - levels)
    chosen = codes.codes_OI.reshape(groups.shape)[..., None]
    got = np.take_along_axis(away, chosen.astype(np.int64), -1)[..., 0]
    np.testing.assert_allclose(got, away.min(-1), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("bits", BITS)
def test_symmetric_is_the_case_of_one_exact_bias(bits: int) -> None:
    codes = _quantize(_weight(), Grid(bits=bits, group_size=32, symmetric=True))
    scales, biases = (part.astype(np.float64) for part in (codes.scales_OG, codes.biases_OG))
    np.testing.assert_array_equal(biases, -(2 ** (bits - 1)) * scales)
    assert (scales > 0).all()


@pytest.mark.parametrize("bits", BITS)
def test_symmetric_takes_the_better_of_its_two_scales(bits: int) -> None:
    weight, half = _weight(), 2 ** (bits - 1)
    codes = _quantize(weight, Grid(bits=bits, group_size=64, symmetric=True), F32)
    dense = dequantize(codes.codes_OI, codes.scales_OG, codes.biases_OG)
    groups = weight.reshape(6, 4, 64)
    ours = ((dense.reshape(groups.shape) - groups) ** 2).sum(-1)
    high, low = groups.max(-1), groups.min(-1)
    for scale in (np.maximum(high / (half - 1), -low / half), np.maximum(high, -low) / half):
        steps = np.clip(np.rint(groups / scale[..., None]), -half, half - 1)
        theirs = ((steps * scale[..., None] - groups) ** 2).sum(-1)
        assert (ours <= theirs * 1.0001).all()


def test_affine_covers_both_ends() -> None:
    weight = _weight()
    codes = _quantize(weight, Grid(bits=4, group_size=64, symmetric=False), F32)
    groups = codes.codes_OI.reshape(-1, 64)
    assert (groups.min(-1) == 0).all()
    assert (groups.max(-1) == 15).all()


def test_per_channel_repeats_one_scale() -> None:
    weight = _weight()
    grid = Grid(bits=8, group_size=64, symmetric=True, per_channel=True)
    codes = _quantize(weight, grid)
    assert codes.scales_OG.shape == (6, 4)
    assert (codes.scales_OG == codes.scales_OG[:, :1]).all()
    wide = Grid(bits=8, group_size=256, symmetric=True)
    one = _quantize(weight, wide)
    np.testing.assert_array_equal(codes.codes_OI, one.codes_OI)
    np.testing.assert_array_equal(codes.scales_OG[:, :1], one.scales_OG)


@pytest.mark.mlx
@pytest.mark.parametrize("bits", [4, 8])
def test_error_is_not_above_mlx(bits: int) -> None:
    mx = pytest.importorskip("mlx.core")
    weight = _weight(rows=64)
    theirs = mx.dequantize(*mx.quantize(mx.array(weight), 64, bits), 64, bits)
    away = np.linalg.norm(np.array(theirs) - weight) / np.linalg.norm(weight)
    ours = _error(weight, _quantize(weight, Grid(bits=bits, group_size=64, symmetric=False), F32))
    assert ours <= away * 1.01


def test_more_bits_and_smaller_groups_are_better() -> None:
    weight = _weight(rows=32)
    for symmetric in (False, True):
        by_bits = [
            _error(weight, _quantize(weight, Grid(bits=b, group_size=64, symmetric=symmetric)))
            for b in BITS
        ]
        assert by_bits == sorted(by_bits, reverse=True)
        by_group = [
            _error(weight, _quantize(weight, Grid(bits=4, group_size=g, symmetric=symmetric)))
            for g in (32, 64, 128)
        ]
        assert by_group == sorted(by_group)


@given(
    st.sampled_from(BITS),
    st.booleans(),
    st.sampled_from([0.0, 1e-30, 1e-6, 3.0, -3.0, 1e4]),
    st.sampled_from([BF16, F32, np.dtype(np.float16)]),
)
@settings(deadline=None)
def test_groups_of_equal_weights(bits: int, symmetric: bool, value: float, dtype: np.dtype) -> None:
    weight = np.full((2, 32), value, np.float32).astype(dtype)
    codes = _quantize(weight, Grid(bits=bits, group_size=32, symmetric=symmetric), dtype)
    dense = dequantize(codes.codes_OI, codes.scales_OG, codes.biases_OG)
    # Half a step, and what rounding the scale to the dtype's smallest number can cost.
    away = np.abs(codes.scales_OG.astype(np.float32)).max() / 2
    away += 2**bits * float(ml_dtypes.finfo(dtype).smallest_subnormal) / 2
    np.testing.assert_allclose(dense, weight.astype(np.float32), rtol=4e-3, atol=away)
    if value == 0.0:
        assert (dense == 0).all()
