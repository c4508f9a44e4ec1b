"""Linears and embeddings over a matrix that expands itself, and is made once for both.

Shape letters: B batch, T tokens, O outputs (or vocabulary), I inputs.
"""

import abc

from torch import Tensor, nn

from pippin.targets.folder import Affine, Folder
from pippin.targets.portable import PortableParts


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

    def __init__(self, matrix: nn.Module, bias_O: Tensor | None):
        super().__init__()
        self.matrix = matrix
        self.register_buffer("bias", bias_O)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """(.., I) to (.., O)."""
        return nn.functional.linear(x_BTI, self.matrix(), self.bias)


class Embedding(nn.Module):
    """Rows of a matrix, which a tied head shares."""

    def __init__(self, matrix: nn.Module):
        super().__init__()
        self.matrix = matrix

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """(B, T) to (B, T, I)."""
        return self.matrix.rows(tokens_BT)  # ty: ignore[not-callable]


class MatrixParts(PortableParts, abc.ABC):
    """Parts over matrices by name: a tied head is the embedding's."""

    def __init__(self) -> None:
        self._matrices: dict[str, nn.Module] = {}

    @abc.abstractmethod
    def quantized(self, name: str, found: Affine) -> nn.Module:
        """A module whose forward() is the weight (O, I), with `rows` as Dense has it."""

    def linear(self, folder: Folder, name: str) -> nn.Module:
        """The linear `name` with its bias."""
        return Linear(self._matrix(folder, name), folder.optional(f"{name}.bias"))

    def embedding(self, folder: Folder, name: str) -> nn.Module:
        """The token embedding."""
        return Embedding(self._matrix(folder, name))

    def _matrix(self, folder: Folder, name: str) -> nn.Module:
        if name not in self._matrices:
            self._matrices[name] = (
                self.quantized(name, folder.affine(name))
                if folder.is_quantized(name)
                else Dense(folder.plain(f"{name}.weight"))
            )
        return self._matrices[name]
