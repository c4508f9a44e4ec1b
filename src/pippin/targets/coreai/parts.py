"""Matrices as Core AI stores them: codes of 4 or 8 bits with a scale for each group.

Shape letters: B batch, T tokens, O outputs (or vocabulary), I inputs, G groups.
"""

import coreai_torch._compression.custom_layers  # noqa: F401  defines torch.ops.coreai
import torch
from torch import Tensor, nn

from pippin.targets.coreai import held_bits
from pippin.targets.folder import Affine
from pippin.targets.matrices import MatrixParts


class Matrix(nn.Module):
    """A weight (O, I) in float32, expanded from its codes inside the graph."""

    codes: Tensor
    scales: Tensor
    biases: Tensor | None

    def __init__(self, found: Affine):
        super().__init__()
        symmetric = found.symmetric
        codes_OI = found.signed if symmetric else found.codes_OI
        biases_OG = None if symmetric else torch.from_numpy(found.biases_OG)
        self.bits = found.bits
        self.logical = getattr(torch, f"{'' if symmetric else 'u'}int{held_bits(found.bits)}")
        self.register_buffer("codes", torch.from_numpy(codes_OI))
        self.register_buffer("scales", torch.from_numpy(found.scales_OG))
        self.register_buffer("biases", biases_OG)

    def forward(self) -> Tensor:
        """scale * code, or scale * code + bias."""
        return torch.ops.coreai.constexpr_blockwise_shift_scale(
            self.codes, self.scales, minval=self.biases, input_dtype=self.logical
        )

    def rows(self, tokens_BT: Tensor) -> Tensor:
        """Some rows, (B, T, I), without expanding the others where codes are whole bytes."""
        if held_bits(self.bits) != 8 or self.scales.shape[1] != 1:
            return self()[tokens_BT]
        rows_BTI = self.codes[tokens_BT].float() * self.scales[tokens_BT]
        return rows_BTI if self.biases is None else rows_BTI + self.biases[tokens_BT]


class CoreAiParts(MatrixParts):
    """Parts over codes and scales; see targets.decoder.Parts."""

    def quantized(self, name: str, found: Affine) -> nn.Module:
        """Codes of any width and grid."""
        return Matrix(found)
