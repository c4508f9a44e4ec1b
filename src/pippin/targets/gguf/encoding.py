"""Every tensor of a quantized folder as the bytes that a GGUF file holds."""

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from pippin.errors import ModelError
from pippin.model.names import module
from pippin.model.quantized import DenseView
from pippin.targets.folder import Folder
from pippin.targets.gguf.blocks import block_type, pack_blocks
from pippin.targets.gguf.superblocks import pack_superblocks
from pippin.targets.gguf.tensors import Place, places

_DENSE = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One tensor: its name in the folder and its codes' bits, its place in the file, its type."""

    source: str
    bits: int | None
    place: Place
    kind: str
    shape: tuple[int, ...]

    @property
    def type(self) -> gguf.GGMLQuantizationType:
        """GGML's type."""
        return gguf.GGMLQuantizationType[self.kind]

    @property
    def byte_shape(self) -> tuple[int, ...]:
        """The shape with the last axis in bytes."""
        block, size = gguf.GGML_QUANT_SIZES[self.type]
        return (*self.shape[:-1], self.shape[-1] // block * size)


class Encoder:
    """The tensors of a folder in its own order, and the bytes of each."""

    def __init__(self, path: Path) -> None:
        self.view, self._folder = DenseView(path), Folder(path)

    def entries(self) -> list[Entry]:
        """All tensors. Raises ModelError for one that GGUF cannot hold."""
        found = places(self.view.config, self.view.tensors)
        return [self._entry(name, place) for name, place in found.items()]

    def encode(self, entry: Entry) -> NDArray[np.uint8]:
        """The tensor's bytes, of `byte_shape`. Raises ModelError where a value would change."""
        order = slice(None) if entry.place.order_O is None else entry.place.order_O
        if entry.bits is not None:
            matrix = module(entry.source)
            pack = pack_superblocks if self._folder.is_nested(matrix) else pack_blocks
            data = pack(matrix, self._folder.affine(matrix))[order]
        else:
            values = self.view.read(entry.source)[order]
            if entry.kind == "F32":
                values = values.astype(np.float32) + np.float32(entry.place.shift)
            data = np.ascontiguousarray(values).view(np.uint8)
        assert data.shape == entry.byte_shape, (entry, data.shape)
        return data

    def _entry(self, name: str, place: Place) -> Entry:
        spec = self.view.tensors[name]
        quantized = name.endswith(".weight") and self._folder.is_quantized(module(name))
        bits, kind = self._codes(module(name)) if quantized else (None, _DENSE[spec.dtype.name])
        if len(spec.shape) == 1:
            kind = "F32"  # llama.cpp multiplies and adds vectors in float32
        return Entry(source=name, bits=bits, place=place, kind=kind, shape=spec.shape)

    def _codes(self, matrix: str) -> tuple[int, str]:
        bits, symmetric = self._folder.grid(matrix)
        kind = block_type(bits, symmetric, self._folder.is_nested(matrix))
        if not kind:
            raise ModelError(
                f"gguf: {matrix} has {bits}-bit codes with zero points, "
                "GGUF holds those up to 5 bits",
                'quantize with scheme = "symmetric" and embed_scheme = "symmetric"',
            )
        return bits, kind
