"""MLX's affine layout, against MLX itself and against float64 arithmetic."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pippin.errors import ModelError
from pippin.model.config import read_config
from pippin.model.quantized import (
    BITS,
    DenseView,
    bits_per_weight,
    count_weights,
    dense_tensors,
    dequantize,
    layout,
    pack,
    unpack,
)
from pippin.model.quantized_floats import MODES, dequantize_floats
from pippin.model.weights import Writer


@given(st.sampled_from(BITS), st.integers(1, 5), st.integers(1, 6), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_codes_survive_packing(bits: int, rows: int, words: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**bits, (rows, 32 * words), np.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (rows, words * bits)
    np.testing.assert_array_equal(unpack(packed, bits, 32 * words), codes)


@pytest.mark.parametrize("bits", BITS)
def test_codes_lie_bit_after_bit(bits: int) -> None:
    """Written out one bit at a time, the definition itself."""
    codes = np.random.default_rng(1).integers(0, 2**bits, (1, 64), np.uint8)
    stream = [(int(code) >> bit) & 1 for code in codes[0] for bit in range(bits)]
    words = [
        sum(bit << place for place, bit in enumerate(stream[at : at + 32]))
        for at in range(0, len(stream), 32)
    ]
    assert pack(codes, bits)[0].tolist() == words


@pytest.mark.mlx
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_mlx_packs_and_dequantizes_alike(bits: int, group_size: int) -> None:
    mx = pytest.importorskip("mlx.core")
    weight = np.random.default_rng(2).normal(size=(5, 256)).astype(np.float32)
    theirs = mx.quantize(mx.array(weight), group_size=group_size, bits=bits)
    packed, scales, biases = (np.array(part) for part in theirs)
    codes = unpack(packed, bits, 256)
    np.testing.assert_array_equal(pack(codes, bits), packed)
    dense = np.array(mx.dequantize(*theirs, group_size=group_size, bits=bits))
    np.testing.assert_allclose(dequantize(codes, scales, biases), dense, rtol=0, atol=1e-6)


def test_dequantize_is_the_formula_in_float64() -> None:
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 256, (4, 64), np.uint8)
    scales = rng.normal(size=(4, 2)).astype(ml_dtypes.bfloat16)
    biases = rng.normal(size=(4, 2)).astype(ml_dtypes.bfloat16)
    dense = dequantize(codes, scales, biases)
    assert dense.dtype == np.float32
    wide = [np.repeat(part.astype(np.float64), 32, axis=1) for part in (scales, biases)]
    np.testing.assert_allclose(dense, codes * wide[0] + wide[1], rtol=1e-6, atol=1e-5)


def _folder(folder: Path, **quantization: object) -> tuple[Path, dict[str, np.ndarray]]:
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 16, (6, 64), np.uint8)
    head = rng.integers(0, 256, (8, 64), np.uint8)
    tensors = {
        "model.layers.0.mlp.up_proj.weight": pack(codes, 4),
        "model.layers.0.mlp.up_proj.scales": rng.normal(size=(6, 2)).astype(np.float32),
        "model.layers.0.mlp.up_proj.biases": rng.normal(size=(6, 2)).astype(np.float32),
        "model.layers.0.mlp.up_proj.bias": rng.normal(size=6).astype(np.float32),
        "lm_head.weight": pack(head, 8),
        "lm_head.scales": rng.normal(size=(8, 1)).astype(np.float32),
        "lm_head.biases": rng.normal(size=(8, 1)).astype(np.float32),
        "model.norm.weight": rng.normal(size=64).astype(np.float16),
    }
    config = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "num_attention_heads": 1,
        "vocab_size": 8,
        "tie_word_embeddings": False,
        "quantization": {
            "group_size": 32,
            "bits": 4,
            "lm_head": {"group_size": 64, "bits": 8},
            "model.layers.0.mlp.down_proj": False,
            **quantization,
        },
        "quantization_grids": {"default": {"symmetric": True, "per_channel": False}, "lm_head": {}},
    }
    (folder / "config.json").write_text(json.dumps(config))
    with Writer(folder, tensors) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    dense = {
        "model.layers.0.mlp.up_proj.weight": dequantize(codes, *_grid(tensors, "mlp.up_proj")),
        "lm_head.weight": dequantize(head, *_grid(tensors, "lm_head")),
    }
    return folder, {
        **{n: t for n, t in tensors.items() if n.endswith(("bias", "norm.weight"))},
        **dense,
    }


def _grid(tensors: dict[str, np.ndarray], module: str) -> tuple[np.ndarray, np.ndarray]:
    (scales,) = (t for n, t in tensors.items() if n.endswith(f"{module}.scales"))
    (biases,) = (t for n, t in tensors.items() if n.endswith(f"{module}.biases"))
    return scales, biases


def test_a_folder_as_dense_tensors(tmp_path: Path) -> None:
    folder, dense = _folder(tmp_path)
    found = dict(dense_tensors(folder))
    assert found.keys() == dense.keys()
    for name, tensor in dense.items():
        np.testing.assert_array_equal(found[name], tensor)
    rows = DenseView(folder).read_rows("lm_head.weight", 3, 7)
    np.testing.assert_array_equal(rows, dense["lm_head.weight"][3:7])


def test_bits_per_weight_count_everything(tmp_path: Path) -> None:
    folder, _ = _folder(tmp_path)
    weights = 6 * 64 + 6 + 8 * 64 + 64
    stored = 6 * 64 * 4 + 2 * 6 * 2 * 32 + 6 * 32 + 8 * 64 * 8 + 2 * 8 * 32 + 64 * 16
    assert count_weights(folder) == weights
    assert bits_per_weight(folder) == stored / weights


def test_layout_of_each_module(tmp_path: Path) -> None:
    config = read_config(_folder(tmp_path)[0])
    up, head = layout(config, "model.layers.0.mlp.up_proj"), layout(config, "lm_head")
    assert up is not None
    assert (up.bits, up.group_size, up.symmetric) == (4, 32, True)
    assert head is not None
    assert (head.bits, head.group_size, head.symmetric) == (8, 64, False)
    assert layout(config, "model.layers.0.mlp.down_proj") is None


def test_config_that_does_not_fit_its_tensors(tmp_path: Path) -> None:
    folder, _ = _folder(tmp_path, bits=8)
    with pytest.raises(ModelError, match=r"up_proj: 8 bits in groups of 32 do not fit"):
        DenseView(folder)


def test_other_modes_are_refused(tmp_path: Path) -> None:
    for number, (mode, bits) in enumerate({"mxfp5": 4, "nvfp4": 8}.items()):
        (inner := tmp_path / str(number)).mkdir()
        folder, _ = _folder(inner, mode=mode, bits=bits)
        with pytest.raises(ModelError, match=f"{mode} with {bits} bits"):
            list(dense_tensors(folder))


@pytest.mark.mlx
@pytest.mark.parametrize(
    ("mode", "group_size", "bits"), [(m, f.group_size, f.bits) for m, f in MODES.items()]
)
def test_small_floats_are_those_of_mlx(mode: str, group_size: int, bits: int) -> None:
    """Bit for bit, over scales from tiny to huge."""
    mx = pytest.importorskip("mlx.core")
    rng = np.random.default_rng(2)
    weight = rng.normal(size=(7, 256)) * 2.0 ** rng.integers(-6, 7, (7, 256))
    settings = {"group_size": group_size, "bits": bits, "mode": mode}
    packed, scales = mx.quantize(mx.array(weight.astype(np.float32)), **settings)
    codes = unpack(np.array(packed), bits, 256)
    ours = dequantize_floats(codes, np.array(scales), MODES[mode])
    wanted = mx.dequantize(packed, scales, **settings).astype(mx.float32)
    np.testing.assert_array_equal(ours, np.array(wanted))
