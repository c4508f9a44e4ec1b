"""A plain or quantized folder as float32 tensors, or as the codes, scales and biases it stores.

Shape letters: O outputs (or vocabulary), I inputs, G groups.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pippin.errors import ModelError
from pippin.model.config import read_config
from pippin.model.quantized import layout, unpack
from pippin.model.weights import Checkpoint
from pippin.quantizers import Grid


@dataclass(frozen=True, kw_only=True, slots=True)
class Affine:
    """A matrix as it is stored: value = codes * scales + biases, codes (O, I) uint8.

    Scales and biases are float32, (O, G). A group's scale and bias that are the same in all groups
    of every row are kept once: G is then 1.
    """

    bits: int
    codes_OI: NDArray[np.uint8]
    scales_OG: NDArray[np.float32]
    biases_OG: NDArray[np.float32]

    @property
    def symmetric(self) -> bool:
        """Whether every bias stands for a code in the middle."""
        return _is_symmetric(self.bits, self.scales_OG, self.biases_OG)

    @property
    def signed(self) -> NDArray[np.int8]:
        """The codes counted from the middle, (O, I)."""
        # The flipped top bit is the sign of a code that counts from -half.
        shift = 8 - self.bits
        flipped = self.codes_OI ^ np.uint8(2 ** (self.bits - 1))
        return (flipped << shift).view(np.int8) >> shift


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

    def is_nested(self, module: str) -> bool:
        """True where a quantized module has scales of scales."""
        return self._layout(module).nested

    def grid(self, module: str) -> tuple[int, bool]:
        """Bits of a quantized module's codes, and whether they are symmetric."""
        bits = self._layout(module).bits
        return bits, _is_symmetric(bits, *self._scales(module))

    def affine(self, module: str) -> Affine:
        """The codes, scales and biases of a quantized module, bit for bit."""
        packed, bits = self._read(f"{module}.weight"), self._layout(module).bits
        scales_OG, biases_OG = self._scales(module)
        if _constant(scales_OG) and _constant(biases_OG):
            scales_OG, biases_OG = scales_OG[:, :1].copy(), biases_OG[:, :1].copy()
        return Affine(
            bits=bits,
            codes_OI=unpack(packed, bits, packed.shape[1] * 32 // bits),
            scales_OG=scales_OG,
            biases_OG=biases_OG,
        )

    def _layout(self, module: str) -> Grid:
        grid = layout(self.config, module)
        assert grid is not None, module
        return grid

    def _scales(self, module: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        scales_OG, biases_OG = self._read(f"{module}.scales"), self._read(f"{module}.biases")
        return scales_OG.astype(np.float32), biases_OG.astype(np.float32)

    def _read(self, name: str) -> NDArray[Any]:
        if name not in self._checkpoint.tensors:
            raise ModelError(
                f"{self.path} has no tensor {name}", "give the whole folder that quantize wrote"
            )
        return self._checkpoint.read(name)


def _constant(values_OG: NDArray[np.float32]) -> bool:
    return bool((values_OG == values_OG[:, :1]).all())


def _is_symmetric(
    bits: int, scales_OG: NDArray[np.float32], biases_OG: NDArray[np.float32]
) -> bool:
    return bool((biases_OG == scales_OG * np.float32(-(2 ** (bits - 1)))).all())
