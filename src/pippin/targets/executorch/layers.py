"""The decoder's parts in forms that XNNPACK takes: exact codes, no mean, slice or symbolic size.

Shape letters: B batch (1), T tokens, D inputs, O outputs, H heads, C head channels, V vocab,
G groups.
"""

import torch
from torch import Tensor, nn

# The embedding operators are defined here; executorch.kernels.quantized has their kernels.
import executorch.exir.passes._quant_patterns_and_replacements  # noqa: F401  isort: skip

INT8_RANGE = (-128, 127)


def fake_quantize(x_BTD: Tensor) -> Tensor:
    """Round every token's activations to int8 with its own scale and zero point, as XNNPACK does.

    Linears that read one tensor share the result, so that it is quantized once.
    """
    return _marked(x_BTD) if torch.compiler.is_exporting() else _rounded(x_BTD)


def _marked(x_BTD: Tensor) -> Tensor:
    # XNNPACK reads these operators as a mark and computes on its own. Of the two families it knows
    # these have shape functions of one step, which every pass of the lowering calls again.
    ops, int8 = torch.ops.quantized_decomposed, torch.int8
    scale_BT1, zero_BT1 = ops.choose_qparams_per_token_asymmetric(x_BTD, int8)
    codes_BTD = ops.quantize_per_token(x_BTD, scale_BT1, zero_BT1, *INT8_RANGE, int8)
    return ops.dequantize_per_token(
        codes_BTD, scale_BT1, zero_BT1, *INT8_RANGE, int8, torch.float32
    )


def _rounded(x_BTD: Tensor) -> Tensor:
    # XNNPACK's own arithmetic, operation by operation: it multiplies by 255 / range where other
    # operators divide by range / 255, and a last bit can move a code.
    low, high = INT8_RANGE
    least_BT1 = x_BTD.amin(-1, keepdim=True).clamp(max=0)
    most_BT1 = x_BTD.amax(-1, keepdim=True).clamp(min=0)
    range_BT1 = most_BT1 - least_BT1
    steps_BT1 = torch.where(range_BT1 == 0, 1.0, (high - low) / range_BT1)
    from_least_BT1, from_most_BT1 = low - least_BT1 * steps_BT1, high - most_BT1 * steps_BT1
    nearer = (low + least_BT1 * steps_BT1) + (high + most_BT1 * steps_BT1) > 0
    zero_BT1 = torch.where(nearer, from_least_BT1, from_most_BT1).clamp(low, high).round()
    codes_BTD = ((x_BTD * steps_BT1).round() + zero_BT1).clamp(low, high)
    return (codes_BTD - zero_BT1) * (1 / steps_BT1)


class QuantizedLinear(nn.Module):
    """A linear over int4 codes in groups or int8 codes per channel; its input is fake-quantized."""

    quantized = True
    codes: Tensor
    scales: Tensor
    zeros: Tensor
    bias: Tensor | None

    def __init__(self, codes_OD: Tensor, scales_OG: Tensor, bits: int, bias_O: Tensor | None):
        super().__init__()
        self.bits = bits
        self.group_size = codes_OD.shape[1] // scales_OG.shape[1]
        self.range = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        self.register_buffer("codes", codes_OD)
        self.register_buffer("scales", scales_OG)
        self.register_buffer("zeros", torch.zeros_like(scales_OG, dtype=torch.int32))
        self.register_buffer("bias", bias_O)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(.., D) to (.., O), float32."""
        exporting = torch.compiler.is_exporting()
        weight_OD = self._marked() if exporting else self._expanded()
        return nn.functional.linear(x_BTD, weight_OD, self.bias)

    def _marked(self) -> Tensor:
        return torch.ops.quantized_decomposed.dequantize_per_channel_group(
            self.codes,
            self.scales,
            self.zeros,
            *self.range,
            torch.int8,
            self.group_size,
            torch.float32,
        )

    def _expanded(self) -> Tensor:
        # The same numbers in a quarter of the operator's time: it subtracts zeros.
        grouped_OGX = self.codes.view(*self.scales.shape, -1)
        return (grouped_OGX * self.scales[..., None]).view(self.codes.shape)


class PlainLinear(nn.Module):
    """A linear that was left unquantized: float32 in XNNPACK."""

    quantized = False
    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight_OD: Tensor, bias_O: Tensor | None):
        super().__init__()
        self.register_buffer("weight", weight_OD)
        self.register_buffer("bias", bias_O)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(.., D) to (.., O), float32."""
        return nn.functional.linear(x_BTD, self.weight, self.bias)


class QuantizedEmbedding(nn.Module):
    """A table of int8 or packed int4 codes, looked up and scaled by ExecuTorch's own operator."""

    codes: Tensor
    scales: Tensor

    def __init__(self, codes_VD: Tensor, scales_VG: Tensor, bits: int):
        super().__init__()
        self.bits = bits
        self.register_buffer("codes", pack_nibbles(codes_VD) if bits == 4 else codes_VD)
        self.register_buffer("scales", scales_VG)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """(B, T) int64 to (B, T, D) float32."""
        ops, codes, scales = torch.ops.quantized_decomposed, self.codes, self.scales
        if not torch.compiler.is_exporting():
            # PyTorch's operator expands its whole table.
            codes, scales = codes[tokens_BT[0]], scales[tokens_BT[0]]
            tokens_BT = torch.arange(tokens_BT.shape[1])[None]
        if self.bits == 4:
            return ops.embedding_4bit(codes, scales, None, -8, 7, tokens_BT)
        return ops.embedding_byte(codes, scales, None, *INT8_RANGE, tokens_BT)


class PlainEmbedding(nn.Module):
    """A table that was left unquantized."""

    weight: Tensor

    def __init__(self, weight_VD: Tensor):
        super().__init__()
        self.register_buffer("weight", weight_VD)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """(B, T) int64 to (B, T, D) float32."""
        return nn.functional.embedding(tokens_BT, self.weight)


class RMSNorm(nn.Module):
    """x / rms(x) * weight; XNNPACK has no mean over the last axis, so a linear of 1/D takes it."""

    weight: Tensor
    averaging: Tensor

    def __init__(self, weight_D: Tensor, eps: float):
        super().__init__()
        size = weight_D.shape[0]
        self.eps = eps
        self.register_buffer("weight", weight_D)
        self.register_buffer("averaging", torch.full((1, size), 1.0 / size))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(.., D) to (.., D)."""
        mean_BT1 = nn.functional.linear(x_BTD * x_BTD, self.averaging)
        return x_BTD * torch.rsqrt(mean_BT1 + self.eps) * self.weight


class Rotation(nn.Module):
    """Rotary position embedding; rotate-half is a signed permutation, exact as a fp32 linear.

    A slice of a tensor whose length is dynamic would leave XNNPACK twice for every head.
    """

    rotate_half: Tensor

    def __init__(self, head_dim: int):
        super().__init__()
        half = head_dim // 2
        rotate_half_CC = torch.zeros(head_dim, head_dim)
        rotate_half_CC[:half, half:] = -torch.eye(half)
        rotate_half_CC[half:, :half] = torch.eye(half)
        self.register_buffer("rotate_half", rotate_half_CC)

    def forward(self, x_BTHC: Tensor, cos_BT1C: Tensor, sin_BT1C: Tensor) -> Tensor:
        """(B, T, H, C) to (B, T, H, C)."""
        rotated_BTHC = nn.functional.linear(x_BTHC, self.rotate_half)
        return x_BTHC * cos_BT1C + rotated_BTHC * sin_BT1C


def pack_nibbles(codes_VD: Tensor) -> Tensor:
    """Codes in [-8, 7] as ExecuTorch packs them: two to a byte, offset by 8, the even one high."""
    shifted = (codes_VD + 8).to(torch.uint8)
    return shifted[:, ::2] << 4 | shifted[:, 1::2]
