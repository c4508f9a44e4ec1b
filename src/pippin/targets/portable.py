"""The decoder's parts in plain PyTorch operators, for runtimes that compile a whole graph.

Shape letters: B batch (1), T tokens, D inputs, H heads, K kv heads, N queries of a kv head, C head
channels, S slots of the cache.
"""

import torch
from torch import Tensor, nn

from pippin.targets.decoder import Shape

# Taken off the scores of slots that a token may not see; a float16 holds it.
UNSEEN = 30000.0


class RMSNorm(nn.Module):
    """x / rms(x) * weight."""

    weight: Tensor

    def __init__(self, weight_D: Tensor, eps: float):
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", weight_D)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(.., D) to (.., D)."""
        mean_BT1 = (x_BTD * x_BTD).mean(-1, keepdim=True)
        return x_BTD * torch.rsqrt(mean_BT1 + self.eps) * self.weight


class Rotation(nn.Module):
    """Rotary position embedding over halves of the channels."""

    def __init__(self, head_dim: int):
        super().__init__()
        self.half_dim = head_dim // 2

    def forward(self, x_BTHC: Tensor, cos_BT1C: Tensor, sin_BT1C: Tensor) -> Tensor:
        """(B, T, H, C) to (B, T, H, C)."""
        rotated_BTHC = torch.cat((-x_BTHC[..., self.half_dim :], x_BTHC[..., : self.half_dim]), -1)
        return x_BTHC * cos_BT1C + rotated_BTHC * sin_BT1C


class Cache(nn.Module):
    """Keys and values of one layer, (1, K, S, C) each, and the attention that reads them."""

    keys: Tensor
    values: Tensor

    def __init__(self, shape: Shape):
        super().__init__()
        self.scale = shape.head_dim**-0.5
        size = (1, shape.num_kv_heads, shape.context, shape.head_dim)
        self.register_buffer("keys", torch.zeros(size), persistent=False)
        self.register_buffer("values", torch.zeros(size), persistent=False)

    def forward(self, q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, start: int) -> Tensor:
        """Write T tokens from slot `start` on, then attend causally; (B, T, H, C) to the same."""
        length, end = q_BTHC.shape[1], start + q_BTHC.shape[1]
        self.keys[:, :, start:end] = k_BTKC.transpose(1, 2)
        self.values[:, :, start:end] = v_BTKC.transpose(1, 2)
        # Queries that read one kv head become rows of it: keys and values are never repeated.
        heads, kv_heads, channels = q_BTHC.shape[2], k_BTKC.shape[2], q_BTHC.shape[3]
        repeat = heads // kv_heads
        q_BTKNC = q_BTHC.view(1, length, kv_heads, repeat, channels)
        rows_BKXC = q_BTKNC.permute(0, 2, 3, 1, 4).reshape(1, kv_heads, repeat * length, channels)
        slots_S, rows_T = torch.arange(self.keys.shape[2]), torch.arange(length) + start
        seen_TS = (slots_S[None] <= rows_T[:, None]).float()
        mask_TS = (seen_TS - 1) * UNSEEN
        mixed_BKXC = nn.functional.scaled_dot_product_attention(
            rows_BKXC, self.keys, self.values, mask_TS.repeat(repeat, 1), scale=self.scale
        )
        mixed_BKNTC = mixed_BKXC.view(1, kv_heads, repeat, length, channels)
        # Contiguous, so that the caller may see heads as one axis.
        mixed_BTKNC = mixed_BKNTC.permute(0, 3, 1, 2, 4).contiguous()
        return mixed_BTKNC.view(1, length, heads, channels)


class PortableParts:
    """What is the same for such runtimes; how a matrix is stored, each says itself."""

    norm, rotation, cache = RMSNorm, Rotation, Cache

    def inputs(self, linears: tuple[nn.Module, ...], x_BTD: Tensor) -> list[Tensor]:
        """The input as it is: activations are not rounded."""
        return [x_BTD] * len(linears)
