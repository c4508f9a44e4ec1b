"""Safetensors read and written one tensor at a time, so that memory is one tensor, not one model.

Format: 8 bytes little-endian header length, a JSON header, then the tensors' bytes
(https://github.com/huggingface/safetensors).
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pippin.errors import ModelError
from pippin.model.names import INDEX, PICKLES

SHARD_BYTES = 5_000_000_000
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


class Checkpoint:
    """The tensors of a model folder, by name; nothing is read before it is asked for.

    Raises ModelError for a folder without safetensors, a header that is not one, a file that is
    shorter or longer than its header says, and an index that does not fit its shards.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files, index = _files(folder)
        self.tensors: dict[str, TensorInfo] = {}
        for file in files:
            for name, info in file_tensors(file).items():
                if name in self.tensors:
                    first = self.tensors[name].file.name
                    raise ModelError(
                        f"{name} is in {first} and in {file.name} of {folder}",
                        "remove the files that do not belong to this model",
                    )
                self.tensors[name] = info
        if index is not None:
            _check_index(folder, index, self.tensors)

    def read(self, name: str) -> NDArray[Any]:
        """A whole tensor in its stored dtype, in memory of its own."""
        return read_tensor(self.tensors[name])

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Rows `start` to `stop` of a tensor's first axis, in memory of their own."""
        info = self.tensors[name]
        stop = min(stop, info.shape[0])
        row = nbytes(info) // info.shape[0]
        part = TensorInfo(
            shape=(stop - start, *info.shape[1:]),
            dtype=info.dtype,
            file=info.file,
            start=info.start + start * row,
            stop=info.start + stop * row,
        )
        return read_tensor(part)


def nbytes(tensor: Shaped) -> int:
    """Bytes of a tensor."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def row_chunks(tensor: Shaped, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of row chunks of about `chunk_bytes` as float32; a whole one for no axis."""
    rows = tensor.shape[0] if tensor.shape else 1
    row = 4 * math.prod(tensor.shape[1:])
    step = max(1, chunk_bytes // max(row, 1))
    yield from ((start, min(start + step, rows)) for start in range(0, rows, step))


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


class Writer:
    """A context manager that writes safetensors, sharded and indexed where there is more than one.

    The tensors are announced first (`infos`: anything with shape and dtype, by name) and may then
    be written in any order, whole or in row chunks. Equal tensors give equal bytes to the format's
    own writer. Flushing to the disk is left to the artifact.
    """

    def __init__(
        self, folder: Path, infos: Mapping[str, Shaped], shard_bytes: int = SHARD_BYTES
    ) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._files: dict[Path, IO[bytes]] = {}
        self._left: dict[str, int] = {name: nbytes(info) for name, info in infos.items()}
        self._places: dict[str, TensorInfo] = {}
        shards = _shards(infos, shard_bytes)
        for number, names in enumerate(shards, 1):
            self._open(folder / _shard_name(number, len(shards)), {n: infos[n] for n in names})
        if len(shards) > 1:
            self._write_index()

    def write(self, name: str, tensor: NDArray[Any]) -> None:
        """A whole tensor, of the announced shape and dtype."""
        assert tensor.shape == self._places[name].shape, (name, tensor.shape)
        self.write_rows(name, 0, tensor)

    def write_rows(self, name: str, start: int, rows: NDArray[Any]) -> None:
        """The tensor's rows from `start` on."""
        place = self._places[name]
        assert rows.dtype == place.dtype, (name, rows.dtype, place.dtype)
        row = nbytes(place) // place.shape[0] if place.shape and place.shape[0] else 0
        file = self._files[place.file]
        file.seek(place.start + start * row)
        file.write(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
        self._left[name] -= rows.nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
        if kind is None:
            unwritten = [name for name, left in self._left.items() if left]
            assert not unwritten, unwritten

    def _open(self, path: Path, infos: dict[str, Shaped]) -> None:
        header = encode_header(infos)
        file = self._stack.enter_context(path.open("wb"))
        file.write(header)
        self._files[path] = file
        at = len(header)
        for name in _layout(infos):
            info = infos[name]
            stop = at + nbytes(info)
            self._places[name] = TensorInfo(
                shape=tuple(info.shape), dtype=info.dtype, file=path, start=at, stop=stop
            )
            at = stop

    def _write_index(self) -> None:
        total = sum(self._left.values())
        places = {name: place.file.name for name, place in sorted(self._places.items())}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def encode_header(infos: Mapping[str, Shaped]) -> bytes:
    """Length and JSON header of a file that holds these tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in _layout(infos):
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


def _layout(infos: Mapping[str, Shaped]) -> list[str]:
    # Widest dtypes first keep every tensor aligned; this is also the order of the format's writer.
    return sorted(infos, key=lambda name: (-_RANK[infos[name].dtype], name))


def _shards(infos: Mapping[str, Shaped], shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    held = 0
    for name, info in infos.items():
        if shards[-1] and held + nbytes(info) > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += nbytes(info)
    return shards


def _shard_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def _files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    path = folder / INDEX
    if path.exists():
        index = _read_index(path)
        files = [folder / name for name in sorted(set(index.values()))]
        for file in files:
            if not file.exists():
                raise ModelError(
                    f"{path} names {file.name}, which is not there", "fetch the model again"
                )
        return files, index
    files = sorted(folder.glob("model*.safetensors"))
    if files:
        return files, None
    if any(next(folder.glob(pattern), None) for pattern in PICKLES):
        raise ModelError(
            f"{folder} holds pickled weights only (.bin, .pt)",
            "pickles can run code: convert them to safetensors, or take a revision that has them",
        )
    raise ModelError(f"{folder} has no model*.safetensors", "give a folder that holds weights")


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = json.loads(path.read_text())["weight_map"]
        assert all(Path(name).name == name for name in index.values())
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise ModelError(f"{path} is not an index of shards", "fetch the model again") from error
    return index


def _check_index(folder: Path, index: dict[str, str], tensors: dict[str, TensorInfo]) -> None:
    for name, file in index.items():
        if name not in tensors or tensors[name].file.name != file:
            raise ModelError(
                f"{folder / INDEX} says that {name} is in {file}, which does not hold it",
                "fetch the model again",
            )
    for name in tensors.keys() - index.keys():
        raise ModelError(
            f"{name} is in {tensors[name].file} and missing from {INDEX}", "fetch the model again"
        )


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
