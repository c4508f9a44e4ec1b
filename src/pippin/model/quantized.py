"""MLX's affine layout: codes packed into uint32, a scale and a bias for each group of inputs.

A quantized module holds `weight` (O, I * bits / 32) uint32, `scales` and `biases` (O, G); a weight
is code * scale + bias. Codes follow each other in a row's bytes, least significant bit first, with
no gap between them (https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.quantize.html).

Shape letters: O output features, I input features, G groups, P packed words.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pippin.errors import ModelError
from pippin.model.config import ModelConfig, read_config
from pippin.model.quantized_floats import Floats, dequantize_floats, find_floats
from pippin.model.weights import Checkpoint, Spec, nbytes
from pippin.quantizers import Codes, Grid, kernels

BITS = (2, 3, 4, 5, 6, 8)
# Symmetric and per-channel grids are special cases of the layout; which tensors have them is noted
# beside `quantization`, whose per-module entries mlx-lm hands to its own code as they are.
GRIDS_KEY = "quantization_grids"


def pack(codes_OI: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Codes below 2**bits, (O, I), as (O, I * bits / 32) uint32. I is a multiple of 32."""
    rows, inputs = codes_OI.shape
    assert inputs % 32 == 0, inputs
    words = np.ascontiguousarray(codes_OI)
    if bits == 8:
        return words.view("<u4")
    if kernels.missing() is None:
        return kernels.pack(words, bits)
    # Neighbours move together: two codes in 16 bits, then four in 32, then eight in 64.
    for width, kind in ((8, "<u2"), (16, "<u4"), (32, "<u8")):
        words = words.view(kind)
        held = words.dtype.type(2**width - 1)
        words = (words & held) | ((words >> width) << (width * bits // 8))
    if bits in (2, 4):  # eight of them fill a word that numpy has
        return words.astype(f"<u{bits}").view("<u4")
    used = words.view(np.uint8).reshape(rows, inputs // 8, 8)[..., :bits]
    return np.ascontiguousarray(used).reshape(rows, -1).view("<u4")


def unpack(packed_OP: NDArray[np.uint32], bits: int, inputs: int) -> NDArray[np.uint8]:
    """The codes (O, inputs) of packed words; the inverse of `pack`."""
    rows = packed_OP.shape[0]
    used = np.ascontiguousarray(packed_OP).view(np.uint8)
    if bits == 8:
        return used.reshape(rows, inputs)
    words = np.zeros((rows, inputs // 8, 8), np.uint8)
    words[..., :bits] = used.reshape(rows, inputs // 8, bits)
    words = words.view("<u8")[..., 0]
    codes = np.empty((rows, inputs // 8, 8), np.uint8)
    for place in range(8):
        codes[..., place] = (words >> np.uint64(place * bits)) & np.uint64(2**bits - 1)
    return codes.reshape(rows, inputs)


def dequantize(
    codes_OI: NDArray[np.uint8], scales_OG: NDArray[Any], biases_OG: NDArray[Any]
) -> NDArray[np.float32]:
    """code * scale + bias in float32, (O, I); a group is I / G inputs that follow each other."""
    rows, inputs = codes_OI.shape
    groups = scales_OG.shape[1]
    values = codes_OI.reshape(rows, groups, inputs // groups).astype(np.float32)
    values *= scales_OG.astype(np.float32)[..., None]
    values += biases_OG.astype(np.float32)[..., None]
    return values.reshape(rows, inputs)


def layout(config: ModelConfig, name: str) -> Grid | None:
    """How the module `name` (without `.weight`) is quantized; None for a dense one.

    A module without an entry of its own follows the default, if it has scales: the caller looks.
    Raises ModelError for a mode that is not affine.
    """
    entry = _entry(config, name)
    if entry is None:
        return None
    if find_floats(name, entry):
        raise ModelError(
            f"{name} is quantized as {entry['mode']}, which has no affine codes",
            "start from the dense model",
        )
    grids = config.raw.get(GRIDS_KEY, {})
    grid = grids.get(name, grids.get("default", {}))
    return Grid(
        bits=entry["bits"],
        group_size=entry["group_size"],
        symmetric=grid.get("symmetric", False),
        per_channel=grid.get("per_channel", False),
        nested=grid.get("nested", False),
    )


def _entry(config: ModelConfig, module: str) -> dict[str, Any] | None:
    """What `quantization` in config.json says of the module; None for a dense one."""
    if config.quantization is None:
        return None
    entry = config.quantization.get(module, config.quantization)
    return config.quantization if entry is True else entry or None


class DenseView:
    """A plain or quantized folder seen as the dense model: every weight under its plain name.

    `tensors` gives the dense shapes; the dtype of a quantized weight is that of its scales. `grids`
    are those of the quantized ones, `floats` the layouts of those in small floats, which are
    bfloat16 here. Raises ModelError where config.json and the tensors are not of one model.
    """

    def __init__(self, folder: Path) -> None:
        self.checkpoint = Checkpoint(folder)
        self.config = read_config(folder)
        self.tensors: dict[str, Spec] = {}
        self.grids: dict[str, Grid] = {}
        self.floats: dict[str, Floats] = {}
        for name, info in self.checkpoint.tensors.items():
            module, _, kind = name.rpartition(".")
            if f"{module}.scales" not in self.checkpoint.tensors or kind == "bias":
                self.tensors[name] = Spec(shape=info.shape, dtype=info.dtype)
            elif kind == "weight":
                self.tensors[name] = self._quantized(name, module)

    def read(self, name: str) -> NDArray[Any]:
        """A whole weight: float32 if it was quantized, in its stored dtype if not."""
        if name not in self.grids and name not in self.floats:
            return self.checkpoint.read(name)
        return self.read_rows(name, 0, self.tensors[name].shape[0])

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Rows of a weight, as `read`."""
        if name in self.floats:
            return self._read_floats(name, start, stop)
        if name not in self.grids:
            return self.checkpoint.read_rows(name, start, stop)
        codes = self.read_codes(name, start, stop)
        return dequantize(codes.codes_OI, codes.scales_OG, codes.biases_OG)

    def read_codes(self, name: str, start: int = 0, stop: int | None = None) -> Codes:
        """Rows of a quantized weight as they are stored; all of them by default."""
        module = name.removesuffix(".weight")
        stop = self.tensors[name].shape[0] if stop is None else stop
        packed, scales_OG, biases_OG = (
            self.checkpoint.read_rows(f"{module}.{part}", start, stop)
            for part in ("weight", "scales", "biases")
        )
        codes_OI = unpack(packed, self.grids[name].bits, self.tensors[name].shape[1])
        return Codes(codes_OI=codes_OI, scales_OG=scales_OG, biases_OG=biases_OG)

    def _read_floats(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        module, floats = name.removesuffix(".weight"), self.floats[name]
        packed = self.checkpoint.read_rows(name, start, stop)
        scales_OG = self.checkpoint.read_rows(f"{module}.scales", start, stop)
        codes_OI = unpack(packed, floats.bits, self.tensors[name].shape[1])
        return dequantize_floats(codes_OI, scales_OG, floats)

    def _quantized(self, name: str, module: str) -> Spec:
        """Note how the weight is stored; its dense shape and dtype."""
        tensors, entry = self.checkpoint.tensors, _entry(self.config, module)
        packed, scales = tensors[name], tensors[f"{module}.scales"]
        floats = find_floats(module, entry) if entry else None
        biased = f"{module}.biases" in tensors
        if entry is None or packed.dtype != np.uint32 or biased == bool(floats):
            raise ModelError(
                f"{module} of {self.checkpoint.folder} has scales and no codes that pippin reads",
                "start from the dense model",
            )
        inputs = packed.shape[-1] * 32 // entry["bits"]
        groups = inputs // entry["group_size"]
        if len(packed.shape) != 2 or scales.shape != (packed.shape[0], groups):
            raise ModelError(
                f"{module}: {entry['bits']} bits in groups of {entry['group_size']} do not fit "
                f"scales of shape {scales.shape} and codes of {packed.shape}",
                "config.json and the weights are not of one model",
            )
        shape = (packed.shape[0], inputs)
        if floats:
            self.floats[name] = floats
            return Spec(shape=shape, dtype=np.dtype(ml_dtypes.bfloat16))
        grid = layout(self.config, module)
        assert grid is not None
        self.grids[name] = grid
        return Spec(shape=shape, dtype=scales.dtype)


def dense_tensors(folder: Path) -> Iterator[tuple[str, NDArray[Any]]]:
    """Every weight of a plain or quantized folder, one at a time, under its plain name.

    What was quantized comes as float32, what was not in its stored dtype.
    """
    view = DenseView(folder)
    for name in view.tensors:
        yield name, view.read(name)


def count_weights(folder: Path) -> int:
    """How many weights the dense model has; scales and biases of groups are none."""
    return sum(math.prod(spec.shape) for spec in DenseView(folder).tensors.values())


def bits_per_weight(folder: Path) -> float:
    """Bits of all tensors, scales and biases included, over the number of weights."""
    stored = sum(nbytes(info) for info in Checkpoint(folder).tensors.values())
    return 8 * stored / count_weights(folder)
