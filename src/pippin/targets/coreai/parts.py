"""Matrices as Core AI stores them: codes of 4 or 8 bits with a scale for each group.

Shape letters: B batch, T tokens, O outputs (or vocabulary), I inputs, G groups.
"""

import coreai_torch._compression.custom_layers  # noqa: F401  defines torch.ops.coreai
import torch
from torch import Tensor, nn

from pippin.targets.folder import Affine, Folder
from pippin.targets.portable import PortableParts


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
        self.logical = getattr(torch, f"{'' if symmetric else 'u'}int{_stored_bits(found.bits)}")
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
        if _stored_bits(self.bits) != 8 or self.scales.shape[1] != 1:
            return self()[tokens_BT]
        rows_BTI = self.codes[tokens_BT].float() * self.scales[tokens_BT]
        return rows_BTI if self.biases is None else rows_BTI + self.biases[tokens_BT]


class Dense(nn.Module):
    """A weight (O, I) that was left unquantized, in float32."""

    weight: Tensor

    def __init__(self, weight_OI: Tensor):
        super().__init__()
        self.register_buffer("weight", weight_OI)

    def forward(self) -> Tensor:
        """The weight."""
        return self.weight

    def rows(self, tokens_BT: Tensor) -> Tensor:
        """Some rows, (B, T, I)."""
        return self.weight[tokens_BT]


class Linear(nn.Module):
    """x @ weight^T + bias."""

    bias: Tensor | None

    def __init__(self, matrix: Matrix | Dense, bias_O: Tensor | None):
        super().__init__()
        self.matrix = matrix
        self.register_buffer("bias", bias_O)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """(.., I) to (.., O)."""
        return nn.functional.linear(x_BTI, self.matrix(), self.bias)


class Embedding(nn.Module):
    """Rows of a matrix, which a tied head shares."""

    def __init__(self, matrix: Matrix | Dense):
        super().__init__()
        self.matrix = matrix

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """(B, T) to (B, T, I)."""
        return self.matrix.rows(tokens_BT)


class CoreAiParts(PortableParts):
    """Parts whose matrices are made once each: a tied head is the embedding's."""

    def __init__(self) -> None:
        self._matrices: dict[str, Matrix | Dense] = {}

    def linear(self, folder: Folder, name: str) -> nn.Module:
        """The linear `name` with its bias."""
        return Linear(self._matrix(folder, name), folder.optional(f"{name}.bias"))

    def embedding(self, folder: Folder, name: str) -> nn.Module:
        """The token embedding."""
        return Embedding(self._matrix(folder, name))

    def _matrix(self, folder: Folder, name: str) -> Matrix | Dense:
        if name not in self._matrices:
            quantized, weight = folder.is_quantized(name), f"{name}.weight"
            made = Matrix(folder.affine(name)) if quantized else Dense(folder.plain(weight))
            self._matrices[name] = made
        return self._matrices[name]


def _stored_bits(bits: int) -> int:
    """Core AI's integers have 2, 4 or 8 bits... wider ones hold narrower codes."""
    return 4 if bits <= 4 else 8
