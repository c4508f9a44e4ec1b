"""Matrices as coremltools takes them: values, with buffers that say which codes they stand for.

Shape letters: B batch, T tokens, O outputs (or vocabulary), I inputs, G groups.
"""

import numpy as np
import torch
from torch import Tensor, nn

from pippin.errors import ModelError
from pippin.targets.coreml import BITS
from pippin.targets.folder import Affine
from pippin.targets.matrices import MatrixParts
from pippin.targets.portable import RMSNorm

# coremltools' name for a quantized weight, among pruned and palettized ones.
_QUANTIZED = 3
SMALLEST = 1e-3


class Matrix(nn.Module):
    """A symmetric matrix: coremltools divides its values by the scales, and has the codes again."""

    def __init__(self, found: Affine):
        super().__init__()
        codes_OI, scales_OG = found.signed.astype(np.float32), found.scales_OG
        rows, groups = scales_OG.shape
        values_OGX = codes_OI.reshape(rows, groups, -1) * scales_OG[..., None]
        values_OI = torch.from_numpy(values_OGX.reshape(codes_OI.shape))
        # A parameter: coremltools looks for notes beside these alone.
        self.weight = nn.Parameter(values_OI, requires_grad=False)
        self._note("compression_type", torch.tensor([_QUANTIZED]))
        self._note("quantization_n_bits", torch.tensor(found.bits))
        self._note("quantization_scale", torch.from_numpy(scales_OG))

    def forward(self) -> Tensor:
        """The weight (O, I)."""
        return self.weight

    def rows(self, tokens_BT: Tensor) -> Tensor:
        """Some rows, (B, T, I)."""
        return nn.functional.embedding(tokens_BT, self.weight)

    def _note(self, key: str, value: Tensor) -> None:
        self.register_buffer(f"_COREML_/weight/{key}", value)


class HalfNorm(RMSNorm):
    """RMSNorm that float16 holds: squares are taken of x over its largest element."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(.., D) to (.., D)."""
        largest_BT1 = x_BTD.abs().amax(-1, keepdim=True) + SMALLEST
        scaled_BTD = x_BTD / largest_BT1
        mean_BT1 = (scaled_BTD * scaled_BTD).mean(-1, keepdim=True)
        eps_BT1 = self.eps / largest_BT1 / largest_BT1
        return scaled_BTD * torch.rsqrt(mean_BT1 + eps_BT1) * self.weight


class CoreMlParts(MatrixParts):
    """Parts over symmetric codes; see targets.decoder.Parts."""

    norm = HalfNorm

    def quantized(self, name: str, found: Affine) -> nn.Module:
        """Raises ModelError for codes that Core ML does not hold."""
        if found.bits not in BITS or not found.symmetric:
            kind = "symmetric" if found.symmetric else "affine"
            raise ModelError(
                f"coreml: {name} has {found.bits}-bit {kind} codes, Core ML holds symmetric ones "
                "of 4 and 8 bits",
                'quantize with bits = 4 and scheme = "symmetric", the embedding with 8 bits',
            )
        return Matrix(found)
