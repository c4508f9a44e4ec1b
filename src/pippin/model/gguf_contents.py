"""What a GGUF file holds: its fields, and every tensor's bytes where they lie.

The format is described in ggml's docs/gguf.md. The reader of the package `gguf` makes a numpy array
of each of a tokenizer's hundred thousand texts, which takes seconds.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_VERSIONS = (2, 3)
_ALIGNMENT = 32
_TEXT, _LIST = 8, 9
# The number of a type, and struct's letter for it.
_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A tensor as it is stored: its shape, outermost axis first, and its rows.

    `data` is float32 or float16 as they are, and uint8, the encoded bytes, of all other types.
    """

    shape: tuple[int, ...]
    tensor_type: Any
    data: NDArray[Any]


def read_contents(path: Path) -> tuple[dict[str, Any], dict[str, Stored]]:
    """Fields and tensors by name. Raises ValueError for what is no whole GGUF file."""
    with path.open("rb") as file:
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return _read(_Cursor(buffer))
    except (struct.error, LookupError, OverflowError, RecursionError) as error:
        raise ValueError(f"what is at its place is no field or tensor ({error})") from error


class _Cursor:
    """Takes one value after the other from little-endian bytes."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer = buffer
        self.at = 0

    def numbers(self, letter: str, count: int = 1) -> tuple[Any, ...]:
        layout = f"<{count}{letter}"
        found = struct.unpack_from(layout, self.buffer, self.at)
        self.at += struct.calcsize(layout)
        return found

    def number(self, letter: str) -> Any:
        return self.numbers(letter)[0]

    def text(self) -> str:
        (found,) = self.numbers("s", self.number("Q"))
        return found.decode()

    def value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind != _LIST:
            return self.number(_NUMBERS[kind])
        inner, count = self.number("I"), self.number("Q")
        if inner in _NUMBERS:
            return list(self.numbers(_NUMBERS[inner], count))
        return [self.value(inner) for _ in range(count)]


def _read(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, Stored]]:
    magic, version = cursor.numbers("s", 4)[0], cursor.number("I")
    if magic != b"GGUF" or version not in _VERSIONS:
        raise ValueError(f"it begins with {magic!r} and version {version}")
    tensor_count, field_count = cursor.numbers("Q", 2)
    fields = {cursor.text(): cursor.value(cursor.number("I")) for _ in range(field_count)}
    places = {cursor.text(): _place(cursor) for _ in range(tensor_count)}
    if len(places) != tensor_count:
        raise ValueError("two tensors have one name")
    alignment = fields.get("general.alignment", _ALIGNMENT)
    if not (isinstance(alignment, int) and alignment > 0):
        raise ValueError(f"general.alignment is {alignment!r:.60}")
    start = -(-cursor.at // alignment) * alignment
    return fields, {name: _stored(cursor.buffer, start, *at) for name, at in places.items()}


def _place(cursor: _Cursor) -> tuple[tuple[int, ...], int, int]:
    """Shape, type and offset of a tensor; GGUF counts its axes from the innermost."""
    shape = cursor.numbers("Q", cursor.number("I"))[::-1]
    return shape, cursor.number("I"), cursor.number("Q")


def _stored(
    buffer: mmap.mmap, start: int, shape: tuple[int, ...], kind: int, offset: int
) -> Stored:
    from gguf import GGMLQuantizationType
    from gguf.quants import quant_shape_to_byte_shape

    encoding = GGMLQuantizationType(kind)
    held, dtype = quant_shape_to_byte_shape(shape, encoding), np.uint8
    if encoding.name in ("F32", "F16"):
        held, dtype = shape, np.float32 if encoding.name == "F32" else np.float16
    data = np.frombuffer(buffer, dtype, int(np.prod(held)), start + offset).reshape(held)
    return Stored(shape=shape, tensor_type=encoding, data=data)
