"""Every tensor of a quantized folder as the bytes that a GGUF file holds.

Shape letters: O outputs, I inputs, G groups.
"""

from dataclasses import dataclass

import gguf
import numpy as np
from numpy.typing import NDArray

from pippin.errors import ModelError
from pippin.model.quantized import DenseView, layout, unpack
from pippin.quantizers import Grid
from pippin.targets.gguf.blocks import Stored, block_type, pack_blocks
from pippin.targets.gguf.tensors import Place, places

_DENSE = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One tensor: its name in the folder and its grid there, its place in the file and its type."""

    source: str
    grid: Grid | None
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


def entries(view: DenseView) -> list[Entry]:
    """All tensors in the folder's order. Raises ModelError for one that GGUF cannot hold."""
    return [_entry(view, *item) for item in places(view.config, view.tensors).items()]


def encode(view: DenseView, entry: Entry) -> NDArray[np.uint8]:
    """The tensor's bytes, of `byte_shape`. Raises ModelError where a value would change."""
    if entry.grid is None:
        values = view.read(entry.source)
        if entry.kind == "F32":
            values = values.astype(np.float32) + np.float32(entry.place.shift)
        data = np.ascontiguousarray(values).view(np.uint8)
    else:
        data = pack_blocks(_read_stored(view, entry), entry.kind)
    assert data.shape == entry.byte_shape, (entry, data.shape)
    return data if entry.place.order_O is None else data[entry.place.order_O]


def _entry(view: DenseView, name: str, place: Place) -> Entry:
    module = name.removesuffix(".weight")
    quantized = name.endswith(".weight") and f"{module}.scales" in view.checkpoint.tensors
    grid = layout(view.config, module) if quantized else None
    return Entry(
        source=name,
        grid=grid,
        place=place,
        kind=_dense_kind(view, name) if grid is None else _block_kind(view, module, grid),
        shape=view.tensors[name].shape,
    )


def _dense_kind(view: DenseView, name: str) -> str:
    spec = view.tensors[name]
    # llama.cpp multiplies and adds vectors in float32.
    return "F32" if len(spec.shape) == 1 else _DENSE[spec.dtype.name]


def _block_kind(view: DenseView, module: str, grid: Grid) -> str:
    kind = block_type(grid.bits, *_scales(view, module))
    if not kind:
        raise ModelError(
            f"gguf: {module} has {grid.bits}-bit codes with zero points, "
            "GGUF holds those up to 5 bits",
            'quantize with scheme = "symmetric" and embed_scheme = "symmetric"',
        )
    return kind


def _read_stored(view: DenseView, entry: Entry) -> Stored:
    assert entry.grid is not None, entry
    module = entry.source.removesuffix(".weight")
    packed = view.checkpoint.read(entry.source)
    scales_OG, biases_OG = _scales(view, module)
    return Stored(
        name=module,
        bits=entry.grid.bits,
        codes_OI=unpack(packed, entry.grid.bits, entry.shape[1]),
        scales_OG=scales_OG,
        biases_OG=biases_OG,
    )


def _scales(view: DenseView, module: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    read = view.checkpoint.read
    return read(f"{module}.scales").astype(np.float32), read(f"{module}.biases").astype(np.float32)
