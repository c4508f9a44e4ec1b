"""A matrix of symmetric codes in the form in which torchao's quantizers write it.

ExecuTorch's partitioners look for it and keep the codes.

Shape letters: B batch (1), T tokens, O outputs (or vocabulary), I inputs.
"""

from collections.abc import Sequence

import torch
import torchao.quantization.quant_primitives  # noqa: F401  defines torch.ops.torchao
from torch import Tensor, nn

from pippin.errors import ModelError
from pippin.targets.folder import Affine


class Matrix(nn.Module):
    """The codes, their scales, and the zeros that a symmetric grid has."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor

    def __init__(self, found: Affine):
        super().__init__()
        self.offset = 2 ** (found.bits - 1)
        self.group_size = found.codes_OI.shape[1] // found.scales_OG.shape[1]
        self.register_buffer("codes", torch.from_numpy(found.signed))
        self.register_buffer("scales", torch.from_numpy(found.scales_OG))
        self.register_buffer("zeros", torch.zeros(found.scales_OG.shape, dtype=torch.int8))

    def forward(self) -> Tensor:
        """The weight (O, I), in the dtype of the scales."""
        return torch.ops.torchao.dequantize_affine(
            self.codes,
            [1, self.group_size],
            self.scales,
            self.zeros,
            torch.int8,
            -self.offset,
            self.offset - 1,
            output_dtype=self.scales.dtype,
        )

    def rows(self, tokens_BT: Tensor) -> Tensor:
        """Some rows, (B, T, I)."""
        return nn.functional.embedding(tokens_BT, self())


def require_grid(target: str, name: str, found: Affine, widths: Sequence[int]) -> None:
    """Raises ModelError for codes that are not symmetric, or of another width."""
    if not found.symmetric or found.bits not in widths:
        kind = "symmetric" if found.symmetric else "affine"
        raise ModelError(
            f"{target}: {name} has {kind} codes of {found.bits} bits, the delegate holds symmetric "
            f"ones of {', '.join(map(str, widths))}",
            'quantize with scheme = "symmetric" and one of these widths',
        )
