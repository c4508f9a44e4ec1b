"""Frozen linears in FP8: one scale a row, products on the tensor cores of recent CUDA cards.

Shape letters: N tokens, I inputs, O outputs.
"""

from typing import Any

import torch
from torch import Tensor, nn

from pippin.engines.torch.lora import LoraLinear
from pippin.errors import UsageError

CODES = torch.float8_e4m3fn
LARGEST = 448.0
SIDE = 16  # both sides of a matrix are a multiple of it
OLDEST = (8, 9)


class Float8Linear(nn.Module):
    """y = x W^T + bias with W and x rounded to FP8; the backward rounds W^T and the gradient.

    Every row of W and of W^T, and every token, has its own scale. The two copies take as much
    memory as one in bfloat16.
    """

    def __init__(self, weight_OI: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_OI.shape
        self.bias = bias
        sides = {"forth": weight_OI, "back": weight_OI.T}
        for name, matrix in sides.items():
            codes, scale = round_rows(matrix.contiguous())
            self.register_buffer(f"{name}_codes", codes, persistent=False)
            self.register_buffer(f"{name}_scale", scale, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O)."""
        y = self.product(x)
        return y if self.bias is None else y + self.bias

    def product(self, x: Tensor) -> Tensor:
        """x W^T."""
        sides = (self.forth_codes, self.forth_scale, self.back_codes, self.back_scale)
        y = _Product.apply(x.reshape(-1, self.in_features), *sides)
        return y.view(*x.shape[:-1], self.out_features)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, *sides: Tensor) -> Tensor:
        forth_codes, forth_scale, back_codes, back_scale = sides
        ctx.save_for_backward(back_codes, back_scale)
        return _multiply(x_NI, forth_codes, forth_scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return _multiply(grads[0], *ctx.saved_tensors), None, None, None, None


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, and the float32 scale of every row, (rows, 1)."""
    scale = (x.abs().amax(-1, keepdim=True).float() / LARGEST).clamp(min=1e-12)
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(CODES), scale


def _multiply(x_NI: Tensor, codes_OI: Tensor, scale_O1: Tensor) -> Tensor:
    x_codes, x_scale = round_rows(x_NI)
    return torch._scaled_mm(
        x_codes,
        codes_OI.T,
        scale_a=x_scale,
        scale_b=scale_O1.T,
        out_dtype=x_NI.dtype,
        use_fast_accum=True,
    )


def refuse_old(device: torch.device) -> None:
    """Raise UsageError where the device cannot multiply FP8."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < OLDEST:
        raise UsageError(
            f'train.frozen_dtype = "float8" does not run on {device.type} here',
            "it needs a CUDA card of compute capability 8.9 or newer; leave it at auto",
        )


def freeze_in_float8(layers: list[nn.Module]) -> str:
    """Put FP8 in the place of the frozen linears of `layers`; what was done, in words."""
    done = [_replace(parent, name) for parent, name in _places(layers)]
    left = f", {done.count(False)} stay as they are" if False in done else ""
    return f"{done.count(True)} frozen linears compute in FP8, which is less exact{left}"


def _places(layers: list[nn.Module]) -> list[tuple[nn.Module, str]]:
    return [
        (module, name)
        for layer in layers
        for module in list(layer.modules())
        for name, child in module.named_children()
        if isinstance(child, nn.Linear | LoraLinear)
    ]


def _replace(parent: nn.Module, name: str) -> bool:
    """False for a matrix whose sides the hardware does not take, or in float32."""
    linear: Any = getattr(parent, name)
    weight = linear.weight
    if (
        weight.dtype != torch.bfloat16
        or weight.requires_grad
        or any(n % SIDE for n in weight.shape)
    ):
        return False
    made = Float8Linear(weight.detach(), linear.bias)
    if isinstance(linear, LoraLinear):
        linear.base, linear.weight = made, None
    else:
        setattr(parent, name, made)
    return True
