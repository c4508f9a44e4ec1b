"""The adapter's linear: a frozen base plus a low-rank update, with a fused backward.

Shape letters: N tokens, I inputs, O outputs, R rank.
"""

from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from pippin.engines.torch.packed import PackedLinear

Frozen: TypeAlias = nn.Linear | PackedLinear


class LoraLinear(nn.Module):
    """y = x W^T + bias + scale * dropout(x) A^T B^T.

    `lora_A` (R, I) and `lora_B` (O, R) are masters in float32 (float64 under a float64 base);
    products run in the base's dtype. A compiler sees plain operations and fuses them itself.
    """

    def __init__(self, base: Frozen, pair: tuple[Tensor, Tensor], scale: float, dropout: float):
        super().__init__()
        self.base: Any = None  # computes the frozen product in another way
        self.weight: Any = None
        self.bias: Tensor | None = base.bias
        if isinstance(base, PackedLinear):
            self.base = base
        else:
            self.weight = base.weight
        self.in_features, self.out_features = base.in_features, base.out_features
        self.scale, self.dropout = scale, dropout
        self.lora_A, self.lora_B = (nn.Parameter(master) for master in pair)

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O)."""
        return self.adapted(x, self.bias)

    def adapted(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The formula with another bias."""
        a_RI = self.lora_A.to(x.dtype)
        b_OR = (self.lora_B * self.scale).to(x.dtype)
        dropout = self.dropout if self.training else 0.0
        if self.base is not None or torch.compiler.is_compiling():
            dropped = functional.dropout(x, dropout) if dropout else x
            update = functional.linear(functional.linear(dropped, a_RI), b_OR)
            return self.frozen(x, bias) + update
        # Reshaped out here: some networks add to the output in place, which no view made inside an
        # autograd function allows.
        x_NI = x.reshape(-1, x.shape[-1])
        y_NO = _Lora.apply(x_NI, self.weight, bias, a_RI, b_OR, dropout)
        return y_NO.view(*x.shape[:-1], -1)

    def master(self, key: str) -> nn.Parameter:
        """The trainable tensor that a checkpoint calls `<linear>.lora_A.weight`, say."""
        return getattr(self, key.removesuffix(".weight").rpartition(".")[2])

    def frozen(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + bias."""
        if self.base is None:
            return functional.linear(x, self.weight, bias)
        y = self.base.product(x)
        return y if bias is None else y + bias


class _Lora(torch.autograd.Function):
    """Saves x, which the neighbours share, and x A^T; never an output-wide temporary."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, weight: Tensor, bias: Tensor | None, *adapter: Any
    ) -> Tensor:
        a_RI, b_OR, dropout = adapter
        kept_NI = None
        if dropout:
            dropped_NI, kept_NI = torch.native_dropout(x_NI, dropout, True)
        z_NR = (dropped_NI if dropout else x_NI) @ a_RI.T
        y_NO = functional.linear(x_NI, weight, bias).addmm_(z_NR, b_OR.T)
        ctx.save_for_backward(x_NI, weight, a_RI, b_OR, z_NR, kept_NI)
        ctx.dropout = dropout
        return y_NO

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x_NI, weight, a_RI, b_OR, z_NR, kept_NI = ctx.saved_tensors
        dy_NO = grads[0].reshape(-1, weight.shape[0])
        dz_NR = dy_NO @ b_OR
        db_OR = dy_NO.T @ z_NR
        keep = 1.0 / (1.0 - ctx.dropout)
        xd_NI = x_NI if kept_NI is None else (x_NI * kept_NI).mul_(keep)
        da_RI = dz_NR.T @ xd_NI
        dx_NI = None
        if ctx.needs_input_grad[0]:
            dx_NI = dy_NO @ weight
            if kept_NI is None:
                dx_NI.addmm_(dz_NR, a_RI)
            else:
                dx_NI.addcmul_(dz_NR @ a_RI, kept_NI, value=keep)
        return dx_NI, None, None, da_RI, db_OR, None
