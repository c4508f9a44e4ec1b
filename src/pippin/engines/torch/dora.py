"""DoRA: the norm of every output's weights is trained apart from their direction.

Shape letters: N tokens, I inputs, O outputs, R rank.
"""

import torch
from torch import Tensor, nn

from pippin.engines.torch.lora import Frozen, LoraLinear
from pippin.engines.torch.packed import PackedLinear


class DoraLinear(LoraLinear):
    """y = gain * (x W^T + scale * dropout(x) A^T B^T) + bias, gain = m / |W + scale B A|.

    `lora_magnitude_vector` m (O,) is a master as A and B are. The norm is by row, and a constant to
    gradients, as in section 4.3 of https://arxiv.org/abs/2402.09353.
    """

    square: Tensor

    def __init__(
        self,
        base: Frozen,
        pair: tuple[Tensor, Tensor],
        scale: float,
        dropout: float,
        magnitude_O: Tensor,
    ) -> None:
        super().__init__(base, pair, scale, dropout)
        self.lora_magnitude_vector = nn.Parameter(magnitude_O)
        weight_OI = base.dense() if isinstance(base, PackedLinear) else base.weight
        norm_O = torch.linalg.vector_norm(weight_OI, dim=1, dtype=magnitude_O.dtype)
        self.register_buffer("square", norm_O.square(), persistent=False)
        self._settled: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O), gained in float32: bfloat16 cannot tell 1.001 from 1."""
        y = self.adapted(x, None) * self._gain(x.dtype)
        return (y if self.bias is None else y + self.bias).to(x.dtype)

    def _gain(self, dtype: torch.dtype) -> Tensor:
        """(O,), computed once for an adapter that is not trained."""
        if self.lora_magnitude_vector.requires_grad:
            return self.lora_magnitude_vector / self._norm(dtype)
        if self._settled is None:
            self._settled = self.lora_magnitude_vector / self._norm(dtype)
        return self._settled

    @torch.no_grad()
    def _norm(self, dtype: torch.dtype) -> Tensor:
        """|W + sBA| by row, from |W|^2 + 2s B (A W^T) + s^2 (BA)(BA)^T: no copy of W is made."""
        exact = self.lora_magnitude_vector.dtype
        b_OR = self.lora_B * self.scale
        cross_OR = self.frozen(self.lora_A.to(dtype), None).T.to(exact)
        inner_OR = 2.0 * cross_OR + b_OR @ (self.lora_A @ self.lora_A.T)
        square_O = self.square + (b_OR * inner_OR).sum(1)
        return square_O.clamp(min=torch.finfo(exact).tiny).sqrt()
