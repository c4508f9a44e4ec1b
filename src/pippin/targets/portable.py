"""The decoder's parts in plain PyTorch operators, for runtimes that compile a whole graph.

Shape letters: B batch (1), T tokens, D inputs, H heads, K kv heads, N queries of a kv head, C head
channels, S slots of the cache.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pippin.targets.shape import Shape

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Slots `start` to `end` take a call's tokens; `mask_XS` is added to scores of N x T rows."""

    start: int
    end: int
    mask_XS: Tensor


class Cache(nn.Module):
    """Keys and values of one layer, (1, K, S, C) each, and the attention that reads them."""

    keys: Tensor
    values: Tensor

    def __init__(self, shape: Shape):
        super().__init__()
        self.scale, self.score_cap = shape.attention_scale, shape.score_cap
        size = (1, shape.num_kv_heads, shape.context, shape.head_dim)
        self.register_buffer("keys", torch.zeros(size), persistent=False)
        self.register_buffer("values", torch.zeros(size), persistent=False)

    def forward(self, q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, place: Place) -> Tensor:
        """Write T tokens at their place, then attend causally; (B, T, H, C) to the same."""
        self.keys[:, :, place.start : place.end] = k_BTKC.transpose(1, 2)
        self.values[:, :, place.start : place.end] = v_BTKC.transpose(1, 2)
        # Queries that read one kv head become rows of it: keys and values are never repeated.
        _, length, heads, channels = q_BTHC.shape
        kv_heads = k_BTKC.shape[2]
        repeat = heads // kv_heads
        q_BTKNC = q_BTHC.view(1, length, kv_heads, repeat, channels)
        rows_BKXC = q_BTKNC.permute(0, 2, 3, 1, 4).reshape(1, kv_heads, repeat * length, channels)
        mixed_BKXC = self._attend(rows_BKXC, place.mask_XS)
        mixed_BKNTC = mixed_BKXC.view(1, kv_heads, repeat, length, channels)
        # Contiguous, so that the caller may see heads as one axis.
        mixed_BTKNC = mixed_BKNTC.permute(0, 3, 1, 2, 4).contiguous()
        return mixed_BTKNC.view(1, length, heads, channels)

    def _attend(self, rows_BKXC: Tensor, mask_XS: Tensor) -> Tensor:
        if self.score_cap is None:
            return nn.functional.scaled_dot_product_attention(
                rows_BKXC, self.keys, self.values, mask_XS, scale=self.scale
            )
        scores_BKXS = rows_BKXC @ self.keys.transpose(2, 3) * (self.scale / self.score_cap)
        scores_BKXS = torch.tanh(scores_BKXS) * self.score_cap + mask_XS
        return scores_BKXS.softmax(-1) @ self.values


class PortableParts:
    """What is the same for such runtimes; how a matrix is stored, each says itself."""

    norm, rotation, cache = RMSNorm, Rotation, Cache

    def place(self, shape: Shape, start: int, length: int, window: int | None) -> Any:
        """Where a call's tokens go, and the mask of what they do not see.

        Layers with a window keep all slots and leave out the old ones, which is simple, not small.
        """
        slots_S, rows_T = torch.arange(shape.context), torch.arange(length) + start
        # Arithmetic on conditions: a `where` of numbers loses its shape in coremltools.
        seen_TS = (slots_S[None] <= rows_T[:, None]).float()
        if window is not None:
            seen_TS = seen_TS * (slots_S[None] > rows_T[:, None] - window).float()
        repeat = shape.num_heads // shape.num_kv_heads
        mask_XS = ((seen_TS - 1) * UNSEEN).repeat(repeat, 1)
        return Place(start=start, end=start + length, mask_XS=mask_XS)

    def inputs(self, linears: tuple[nn.Module, ...], x_BTD: Tensor) -> list[Tensor]:
        """The input as it is: activations are not rounded."""
        return [x_BTD] * len(linears)
