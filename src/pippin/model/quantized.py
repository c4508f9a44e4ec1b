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

import numpy as np
from numpy.typing import NDArray

from pippin.errors import ModelError
from pippin.model.config import ModelConfig, read_config
from pippin.model.weights import Checkpoint, nbytes
from pippin.quantizers import Grid

BITS = (2, 3, 4, 5, 6, 8)
# Symmetric and per-channel grids are special cases of the layout; which tensors have them is noted
# beside `quantization`, whose per-module entries mlx-lm hands to its own code as they are.
GRIDS_KEY = "quantization_grids"


def pack(codes_OI: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Codes below 2**bits, (O, I), as (O, I * bits / 32) uint32. I is a multiple of 32."""
    rows, inputs = codes_OI.shape
    assert inputs % 32 == 0, inputs
    if bits == 8:
        return np.ascontiguousarray(codes_OI).view("<u4")
    eights = codes_OI.reshape(rows, inputs // 8, 8)
    words = np.zeros(eights.shape[:2], "<u8")
    for place in range(8):
        words |= eights[..., place].astype(np.uint64) << np.uint64(place * bits)
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
    if config.quantization is None:
        return None
    entry = config.quantization.get(name, config.quantization)
    if entry is False:
        return None
    if entry is True:
        entry = config.quantization
    mode = entry.get("mode", "affine")
    if mode != "affine":
        raise ModelError(
            f"{name} is quantized as {mode}, pippin reads affine", "start from the dense model"
        )
    grids = config.raw.get(GRIDS_KEY, {})
    grid = grids.get(name, grids.get("default", {}))
    return Grid(
        bits=entry["bits"],
        group_size=entry["group_size"],
        symmetric=grid.get("symmetric", False),
        per_channel=grid.get("per_channel", False),
    )


def read_dense(checkpoint: Checkpoint, config: ModelConfig, module: str) -> NDArray[np.float32]:
    """One quantized module's weight as float32, (O, I)."""
    grid = layout(config, module)
    packed_OP = checkpoint.read(f"{module}.weight")
    scales_OG = checkpoint.read(f"{module}.scales")
    biases_OG = checkpoint.read(f"{module}.biases")
    if grid is None or packed_OP.dtype != np.uint32 or packed_OP.ndim != 2:
        raise ModelError(
            f"{module} of {checkpoint.folder} has scales but no codes that pippin can read",
            "start from the dense model",
        )
    inputs = packed_OP.shape[1] * 32 // grid.bits
    if scales_OG.shape != (len(packed_OP), inputs // grid.group_size):
        raise ModelError(
            f"{module}: {grid.bits} bits in groups of {grid.group_size} do not fit scales of shape "
            f"{scales_OG.shape} and {packed_OP.shape[1]} words a row",
            "config.json and the weights are not of one model",
        )
    return dequantize(unpack(packed_OP, grid.bits, inputs), scales_OG, biases_OG)


def dense_tensors(folder: Path) -> Iterator[tuple[str, NDArray[Any]]]:
    """Every weight of a plain or quantized folder, one at a time, under its plain name.

    What was quantized comes as float32, what was not in its stored dtype.
    """
    checkpoint, config = Checkpoint(folder), read_config(folder)
    for name in checkpoint.tensors:
        module, _, kind = name.rpartition(".")
        if f"{module}.scales" not in checkpoint.tensors:
            yield name, checkpoint.read(name)
        elif kind == "weight":
            yield name, read_dense(checkpoint, config, module)
        elif kind == "bias":
            yield name, checkpoint.read(name)


def count_weights(folder: Path) -> int:
    """How many weights the dense model has; scales and biases of groups are none."""
    checkpoint, config = Checkpoint(folder), read_config(folder)
    total = 0
    for name, info in checkpoint.tensors.items():
        module, _, kind = name.rpartition(".")
        grid = layout(config, module) if f"{module}.scales" in checkpoint.tensors else None
        if grid is None or kind == "bias":
            total += math.prod(info.shape)
        elif kind == "weight":
            total += math.prod(info.shape) * 32 // grid.bits
    return total


def bits_per_weight(folder: Path) -> float:
    """Bits of all tensors, scales and biases included, over the number of weights."""
    stored = sum(nbytes(info) for info in Checkpoint(folder).tensors.values())
    return 8 * stored / count_weights(folder)
