"""The safetensors format: where each tensor of a file lies, read one at a time, header written.

Format: 8 bytes little-endian header length, a JSON header, then the tensors' bytes
(https://github.com/huggingface/safetensors).
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pippin.errors import ModelError

_MAX_HEADER = 100_000_000  # the format's own limit
_FETCH_AGAIN = "the file is damaged or was cut off: fetch the model again"

# In the order in which the format's own writer lays tensors out, widest last.
DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_RANK = {dtype: rank for rank, dtype in enumerate(DTYPES.values())}


class Shaped(Protocol):
    """Anything with a shape and a dtype: an array, a TensorInfo, a Spec."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """A tensor to be written."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """Where a tensor lies: bytes `start` to `stop` of `file`."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    file: Path
    start: int
    stop: int


def nbytes(tensor: Shaped) -> int:
    """Bytes of a tensor."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def row_chunks(tensor: Shaped, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of row chunks of about `chunk_bytes` as float32; a whole one for no axis."""
    rows = tensor.shape[0] if tensor.shape else 1
    row = 4 * math.prod(tensor.shape[1:])
    step = max(1, chunk_bytes // max(row, 1))
    yield from ((start, min(start + step, rows)) for start in range(0, rows, step))


def is_finite(tensor: NDArray[Any]) -> bool:
    """Whether no element is NaN or infinite; whole numbers always are finite."""
    if tensor.dtype == ml_dtypes.bfloat16:
        # As bits: what is not finite is above all that is positive, or above all that is negative.
        signed, unsigned = tensor.view(np.int16), tensor.view(np.uint16)
        return bool(signed.max(initial=0) < 0x7F80 and unsigned.max(initial=0) < 0xFF80)
    if tensor.dtype.kind in "biu":
        return True
    return bool(np.isfinite(tensor).all())


def read_tensor(info: TensorInfo) -> NDArray[Any]:
    """The tensor in memory of its own."""
    tensor = np.empty(math.prod(info.shape) * info.dtype.itemsize, np.uint8)
    view = tensor.data
    with info.file.open("rb", buffering=0) as file:
        file.seek(info.start)
        done = 0
        while done < len(view):
            count = file.readinto(view[done:])
            if not count:
                raise ModelError(
                    f"{info.file} ends at byte {info.start + done}, a tensor at {info.stop}",
                    _FETCH_AGAIN,
                )
            done += count
    return tensor.view(info.dtype).reshape(info.shape)


def file_tensors(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file. Raises ModelError for a file that is none."""
    size = file.stat().st_size
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if size < 8 or length > min(_MAX_HEADER, size - 8):
            raise ModelError(
                f"{file} has {size} bytes, its header says that it alone takes {length}",
                _FETCH_AGAIN,
            )
        header = _parse_header(file, handle.read(length))
    header.pop("__metadata__", None)
    tensors = {name: _info(file, name, entry, 8 + length) for name, entry in header.items()}
    end = max((info.stop for info in tensors.values()), default=8 + length)
    if end != size:
        raise ModelError(f"{file} has {size} bytes, its header describes {end}", _FETCH_AGAIN)
    return tensors


def encode_header(infos: Mapping[str, Shaped]) -> bytes:
    """Length and JSON header of a file that holds these tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in file_order(infos):
        info = infos[name]
        stop = at + nbytes(info)
        header[name] = {
            "dtype": _NAMES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [at, stop],
        }
        at = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def file_order(infos: Mapping[str, Shaped]) -> list[str]:
    """Names in the order of the format's own writer: widest dtype first, then by name.

    Widest first keeps every tensor aligned.
    """
    return sorted(infos, key=lambda name: (-_RANK[infos[name].dtype], name))


def _parse_header(file: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except ValueError as error:
        raise ModelError(f"the header of {file} is damaged: {error}", _FETCH_AGAIN) from error
    if not isinstance(header, dict):
        raise ModelError(f"the header of {file} is no JSON object", _FETCH_AGAIN)
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a tensor is named twice")
    return dict(pairs)


def _info(file: Path, name: str, entry: Any, base: int) -> TensorInfo:
    try:
        begin, end = entry["data_offsets"]
        shape, dtype = tuple(entry["shape"]), entry["dtype"]
        if begin < 0 or any(size < 0 for size in shape):
            raise ValueError("negative")
    except (TypeError, KeyError, ValueError) as error:
        raise ModelError(f"{file}: the header entry of {name} is damaged", _FETCH_AGAIN) from error
    if dtype not in DTYPES:
        raise ModelError(f"{file}: {name} has dtype {dtype}, which pippin cannot read", "convert")
    info = TensorInfo(
        shape=shape, dtype=DTYPES[dtype], file=file, start=base + begin, stop=base + end
    )
    if info.stop - info.start != nbytes(info):
        raise ModelError(
            f"{file}: {name} of shape {shape} takes {nbytes(info)} bytes, has {end - begin}",
            _FETCH_AGAIN,
        )
    return info
