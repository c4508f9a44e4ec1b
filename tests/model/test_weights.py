"""Safetensors: read and written as the format's own library does, damage told apart."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from pippin.errors import ModelError
from pippin.model.weights import Checkpoint, Writer, is_finite, row_chunks

BF16 = np.dtype(ml_dtypes.bfloat16)


def _tensors() -> dict[str, NDArray]:
    rng = np.random.default_rng(0)
    return {
        "model.layers.0.q.weight": rng.normal(size=(6, 10)).astype(np.float32),
        "model.layers.10.q.weight": rng.normal(size=(3, 5)).astype(BF16),
        "model.layers.2.q.weight": rng.normal(size=(5, 7)).astype(np.float16),
        "codes": rng.integers(0, 255, (4, 3), np.uint8),
        "packed": rng.integers(0, 2**32, (2, 3), np.uint32),
        "norm": rng.normal(size=3).astype(BF16),
        "scalar": np.array(2.5, np.float32),
        "empty": np.zeros((0, 4), np.float32),
    }


def _write(folder: Path, tensors: dict[str, NDArray], **how: int) -> Path:
    folder.mkdir(exist_ok=True)
    with Writer(folder, tensors, **how) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    return folder


def test_file_is_the_one_the_library_writes(tmp_path: Path) -> None:
    tensors = _tensors()
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    _write(tmp_path / "ours", tensors)
    ours = (tmp_path / "ours" / "model.safetensors").read_bytes()
    assert ours == (tmp_path / "theirs.safetensors").read_bytes()


def test_read_gives_what_the_library_gives(tmp_path: Path) -> None:
    tensors = _tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        found = checkpoint.read(name)
        assert found.dtype == tensor.dtype
        assert found.shape == tensor.shape
        assert found.tobytes() == tensor.tobytes()
        assert found.flags.owndata or found.base.flags.owndata
    rows = checkpoint.read_rows("model.layers.0.q.weight", 2, 5)
    np.testing.assert_array_equal(rows, tensors["model.layers.0.q.weight"][2:5])


def test_rows_in_any_order_make_the_same_file(tmp_path: Path) -> None:
    tensor = np.arange(60, dtype=np.float32).reshape(12, 5)
    _write(tmp_path / "whole", {"b": tensor, "a": tensor})
    with Writer(tmp_path, {"b": tensor, "a": tensor}) as writer:
        for start in (8, 0, 4):
            writer.write_rows("a", start, tensor[start : start + 4])
            writer.write_rows("b", start, tensor[start : start + 4])
    whole = (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert (tmp_path / "model.safetensors").read_bytes() == whole


def test_transposed_rows_are_written_in_their_order(tmp_path: Path) -> None:
    tensor = np.arange(12, dtype=np.float32).reshape(3, 4).T
    _write(tmp_path, {"a": tensor})
    np.testing.assert_array_equal(load_file(tmp_path / "model.safetensors")["a"], tensor)


def test_shards_have_an_index_that_the_library_can_follow(tmp_path: Path) -> None:
    tensors = _tensors()
    _write(tmp_path, tensors, shard_bytes=250)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, "np") as opened:
            assert opened.get_slice(name).get_shape() == list(tensors[name].shape)
    checkpoint = Checkpoint(tmp_path)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(checkpoint.read(name), tensor)


def test_a_tensor_left_out_is_our_fault(tmp_path: Path) -> None:
    writer = Writer(tmp_path, {"a": np.zeros(3, np.float32)})
    with pytest.raises(AssertionError, match="a"):
        writer.__exit__(None, None, None)


@pytest.mark.parametrize("cut", [1, 100, 260])
def test_truncated_file_names_both_sizes(tmp_path: Path, cut: int) -> None:
    _write(tmp_path, {"a": np.zeros((8, 8), np.float32), "b": np.zeros(8, np.float32)})
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    with pytest.raises(ModelError, match=rf"has {len(whole) - cut} bytes.* {len(whole)}"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 bytes"),
        (b"\x02\0\0", "has 3 bytes"),
        (b"\xff" * 8 + b"{}", "has 10 bytes"),
        (b"\x05\0\0\0\0\0\0\0{oops", "is damaged"),
        (b"\x02\0\0\0\0\0\0\0[]", "no JSON object"),
        (b"\x02\0\0\0\0\0\0\0\xff\xff", "is damaged"),
        (b'\x0d\0\0\0\0\0\0\0{"a":{},"a":1', "is damaged"),
        (b'\x08\0\0\0\0\0\0\0{"a":{}}', "entry of a"),
    ],
)
def test_header_that_is_none(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=message):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, "takes 12 bytes, has 8"),
        ({"dtype": "F4", "shape": [2], "data_offsets": [0, 8]}, "dtype F4"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}, "takes 8 bytes"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}, "entry of a"),
        ({"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}, "entry of a"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}, "entry of a"),
    ],
)
def test_entry_that_contradicts_itself(tmp_path: Path, entry: dict, message: str) -> None:
    header = json.dumps({"a": entry}).encode()
    data = len(header).to_bytes(8, "little") + header + b"\0" * 8
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelError, match=message):
        Checkpoint(tmp_path)


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    tensors = {name: np.zeros(64, np.float32) for name in "abc"}
    _write(tmp_path, tensors, shard_bytes=256)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    third = tmp_path / index["weight_map"]["c"]
    third.rename(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match="names model-00003-of-00003"):
        Checkpoint(tmp_path)
    (tmp_path / "elsewhere").rename(third)
    path.write_text(json.dumps({"weight_map": {**index["weight_map"], "d": third.name}}))
    with pytest.raises(ModelError, match="says that d is in"):
        Checkpoint(tmp_path)
    path.write_text('{"weight_map": {"a": "../outside.safetensors"}}')
    with pytest.raises(ModelError, match="not an index"):
        Checkpoint(tmp_path)


def test_tensor_in_two_files(tmp_path: Path) -> None:
    for name in ("model-1.safetensors", "model-2.safetensors"):
        save_file({"a": np.zeros(2, np.float32)}, tmp_path / name)
    with pytest.raises(ModelError, match=r"a is in model-1.safetensors and in model-2.safetensors"):
        Checkpoint(tmp_path)


def test_pickles_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match="pickled") as caught:
        Checkpoint(tmp_path)
    assert "safetensors" in caught.value.hint


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_finite(dtype: np.dtype, value: float) -> None:
    tensor = np.array([1.0, -3e4, 0.0, 6e-8], dtype)
    assert is_finite(tensor)
    tensor[2] = value
    assert not is_finite(tensor)


def test_row_chunks_cover_every_row_once() -> None:
    chunks = list(row_chunks(np.zeros((10, 4), np.float32), 3 * 16))
    assert chunks == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert list(row_chunks(np.zeros((2, 4), np.float32), 1)) == [(0, 1), (1, 2)]
