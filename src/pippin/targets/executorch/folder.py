"""Reads a quantized folder as exact signed codes and scales, or says why XNNPACK cannot hold them.

Shape letters: O outputs (or vocabulary), D inputs, G groups.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pippin.errors import ModelError
from pippin.model.config import read_config
from pippin.model.quantized import layout, unpack
from pippin.model.weights import Checkpoint
from pippin.targets.executorch.constraint import GROUP_MULTIPLE


@dataclass(frozen=True, kw_only=True, slots=True)
class Codes:
    """A symmetric matrix: value = codes * scales, codes int8 (O, D), scales float32 (O, G).

    A scale that is the same in all groups of every row is stored once: G is then 1.
    """

    codes_OD: Tensor
    scales_OG: Tensor
    bits: int


class Folder:
    """A Hugging Face folder, plain or quantized in MLX's layout; tensors are read on demand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_config(path)
        self._checkpoint = Checkpoint(path)

    def plain(self, name: str) -> Tensor:
        """An unquantized tensor in float32. Raises ModelError where it is missing."""
        return torch.from_numpy(self._read(name).astype(np.float32, order="C"))

    def optional(self, name: str) -> Tensor | None:
        """An unquantized tensor in float32, None where the folder has none."""
        return self.plain(name) if name in self._checkpoint.tensors else None

    def is_quantized(self, module: str) -> bool:
        """True where the module's weight is stored as codes."""
        return f"{module}.scales" in self._checkpoint.tensors

    def codes(self, module: str) -> Codes:
        """The module's codes and scales, bit for bit. Raises ModelError if not symmetric."""
        grid = layout(self.config, module)
        if grid is None or grid.bits not in (4, 8):
            raise ModelError(
                f"{module} has {grid and grid.bits}-bit codes, XNNPACK holds 4 and 8",
                "quantize with bits = 4",
            )
        half = 2 ** (grid.bits - 1)
        scales_OG = self._read(f"{module}.scales").astype(np.float32)
        if not np.array_equal(self._read(f"{module}.biases").astype(np.float32), scales_OG * -half):
            raise ModelError(
                f"{module} is quantized with zero points, XNNPACK holds symmetric codes only",
                'quantize with scheme = "symmetric" and embed_scheme = "symmetric"',
            )
        packed = self._read(f"{module}.weight")
        codes_OD = unpack(packed, grid.bits, packed.shape[1] * 32 // grid.bits) ^ half
        return Codes(
            # The flipped top bit is the sign of a code that counts from -half.
            codes_OD=torch.from_numpy(_sign_extended(codes_OD, grid.bits)),
            scales_OG=torch.from_numpy(_merged(scales_OG)),
            bits=grid.bits,
        )

    def linear_codes(self, module: str) -> Codes:
        """Codes of a linear, in a form XNNPACK multiplies. Raises ModelError for any other."""
        found = self.codes(module)
        if found.bits == 8:
            _require_channels(module, found)
        else:
            _require_blocks(module, found)
        return found

    def _read(self, name: str) -> np.ndarray:
        if name not in self._checkpoint.tensors:
            raise ModelError(
                f"{self.path} has no tensor {name}", "give the whole folder that quantize wrote"
            )
        return self._checkpoint.read(name)


def _sign_extended(codes_OD: np.ndarray, bits: int) -> np.ndarray:
    shift = 8 - bits
    return (codes_OD << shift).view(np.int8) >> shift


def _merged(scales_OG: np.ndarray) -> np.ndarray:
    same = bool((scales_OG == scales_OG[:, :1]).all())
    return np.ascontiguousarray(scales_OG[:, :1] if same else scales_OG)


def _require_channels(module: str, found: Codes) -> None:
    if found.scales_OG.shape[1] != 1:
        raise ModelError(
            f"{module}: 8-bit codes with a scale a group, XNNPACK takes one scale a channel",
            "quantize 8-bit linears and tied heads with group_size = 0",
        )


def _require_blocks(module: str, found: Codes) -> None:
    inputs, groups = found.codes_OD.shape[1], found.scales_OG.shape[1]
    if inputs % groups or inputs // groups % GROUP_MULTIPLE:
        raise ModelError(
            f"{module}: 4-bit groups of {inputs / groups:g} over {inputs} inputs, "
            f"XNNPACK takes multiples of {GROUP_MULTIPLE}",
            f"quantize with group_size = {GROUP_MULTIPLE}, or keep this tensor dense",
        )
    # XNNPACK stores block scales in bfloat16: more precision would be lost without a word.
    if not torch.equal(found.scales_OG.bfloat16().float(), found.scales_OG):
        raise ModelError(
            f"{module}: group scales have more precision than bfloat16, which XNNPACK stores",
            "start from a bfloat16 model: scales have its dtype",
        )
