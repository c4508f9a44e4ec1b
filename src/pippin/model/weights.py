"""A model folder's weights, read and written one tensor at a time: memory is one tensor."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import IO, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from pippin.errors import ModelError
from pippin.model.names import INDEX, PICKLES
from pippin.model.tensors import (
    Shaped,
    Spec,
    TensorInfo,
    encode_header,
    file_order,
    file_tensors,
    is_finite,
    nbytes,
    read_tensor,
    row_chunks,
)

__all__ = [
    "Checkpoint",
    "Shaped",
    "Spec",
    "TensorInfo",
    "Tensors",
    "Writer",
    "file_tensors",
    "is_finite",
    "nbytes",
    "read_tensor",
    "row_chunks",
]

SHARD_BYTES = 5_000_000_000


class Tensors(Protocol):
    """A model's tensors by name, read when they are asked for: a folder's own, or made from it."""

    folder: Path

    @property
    def tensors(self) -> Mapping[str, Shaped]:
        """Shape and dtype of every tensor."""
        ...

    def read(self, name: str) -> NDArray[Any]:
        """A whole tensor."""
        ...

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Rows `start` to `stop` of a tensor's first axis."""
        ...


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


class Writer:
    """A context manager that writes safetensors, sharded and indexed where there is more than one.

    The tensors are announced first (`infos`: anything with shape and dtype, by name) and may then
    be written in any order and by any thread, whole or in row chunks. Equal tensors give equal
    bytes to the format's own writer. Flushing to the disk is left to the artifact.
    """

    def __init__(
        self, folder: Path, infos: Mapping[str, Shaped], shard_bytes: int = SHARD_BYTES
    ) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._files: dict[Path, IO[bytes]] = {}
        self._lock = Lock()
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
        held = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
        with self._lock:
            file.seek(place.start + start * row)
            file.write(held)
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
        for name in file_order(infos):
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
