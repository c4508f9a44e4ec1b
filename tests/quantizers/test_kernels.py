"""The passes in C++ give the bytes of numpy's; test_rtn compares both with float64."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pippin.model.quantized import BITS, pack
from pippin.quantizers import Codes, Grid, kernels, load_quantizer
from pippin.stages.coding import Error

pytestmark = pytest.mark.skipif(kernels.missing() is not None, reason=str(kernels.missing()))
DTYPES = [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)]
GRIDS = {
    "affine": {"symmetric": False},
    "symmetric": {"symmetric": True},
    "affine, per channel": {"symmetric": False, "per_channel": True},
    "symmetric, per channel": {"symmetric": True, "per_channel": True},
}


def _weight(dtype: np.dtype[Any], inputs: int) -> np.ndarray:
    """Common rows, ties, zeros of both signs, equal weights, denormal ones, and a wide range."""
    rng = np.random.default_rng(inputs)
    weight = (rng.standard_t(4, (61, inputs)) * 0.02).astype(np.float32)
    weight[0] = np.arange(inputs) % 31 / 2
    weight[1] = np.arange(inputs) % 15 - 7.5
    weight[2] = np.where(rng.random(inputs) < 0.5, 0.0, -0.0)
    weight[3], weight[4], weight[5] = -0.0, 0.3, -0.3
    weight[6:8] = rng.integers(-9, 9, (2, inputs)) * float(
        ml_dtypes.finfo(dtype).smallest_subnormal
    )
    weight[8] = np.exp(rng.uniform(-30, 10, inputs)) * rng.choice([-1, 1], inputs)
    weight[9] = np.abs(weight[9])
    return weight.astype(dtype)


def _all(weight: np.ndarray, grid: Grid, method: str = "rtn") -> tuple[Codes, bytes, Error]:
    codes = load_quantizer(method).quantize(weight, grid, weight.dtype)
    arrays = (pack(codes.codes_OI, grid.bits), codes.scales_OG, codes.biases_OG)
    return codes, b"".join(array.tobytes() for array in arrays), Error.of(weight, codes)


def _compare(
    weight: np.ndarray, grid: Grid, monkeypatch: pytest.MonkeyPatch, method: str = "rtn"
) -> None:
    assert kernels.fit(weight.reshape(len(weight), -1, 32))
    ours, stored, error = _all(weight, grid, method)
    with monkeypatch.context() as patch:
        patch.setitem(kernels.COMPILED.__dict__, "missing", "switched off")
        assert not kernels.fit(weight.reshape(len(weight), -1, 32))
        plain, wanted, plain_error = _all(weight, grid, method)
    for name in ("codes_OI", "scales_OG", "biases_OG"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(plain, name), err_msg=str(grid))
    assert stored == wanted, grid
    assert error.largest == plain_error.largest
    assert error.noise == pytest.approx(plain_error.noise, rel=1e-4)
    assert error.signal == pytest.approx(plain_error.signal, rel=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", GRIDS.values(), ids=GRIDS)
def test_every_byte_is_the_same(
    dtype: np.dtype[Any], scheme: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    for bits in BITS:
        for size in (32, 64, 128):
            grid = Grid(bits=bits, group_size=size, **scheme)
            _compare(_weight(dtype, 3 * size), grid, monkeypatch)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6])
def test_nested_grids_are_the_same(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = Grid(bits=bits, group_size=32, symmetric=bits in (3, 6), nested=True)
    _compare(_weight(DTYPES[1], 768), grid, monkeypatch)


@pytest.mark.parametrize("method", ["mse", "hqq"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_other_methods_are_the_same(
    method: str, symmetric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = Grid(bits=3, group_size=64, symmetric=symmetric)
    _compare(_weight(DTYPES[1], 192), grid, monkeypatch, method)


def test_scales_that_do_not_fit_are_not_finite_in_both(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = np.full((1, 32), 3e38, np.float32)
    weight[0, ::2] = -3e38
    grid = Grid(bits=4, group_size=32, symmetric=False)
    with np.errstate(over="ignore", invalid="ignore"):
        ours = _all(weight, grid)[0]
        monkeypatch.setitem(kernels.COMPILED.__dict__, "missing", "switched off")
        plain = _all(weight, grid)[0]
    assert not np.isfinite(ours.scales_OG).any()
    assert not np.isfinite(plain.scales_OG).any()
