"""The decoder's parts in the forms that ExecuTorch's LLM operators and XNNPACK take.

Shape letters: B batch (1), T tokens, D inputs, H heads, K kv heads, C head channels, S slots.
"""

from typing import TypeAlias

# The library with llama.update_cache and llama.custom_sdpa; importing it is what defines them.
import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401
import torch
from torch import Tensor, nn

from pippin.targets.decoder import Shape, Weights
from pippin.targets.executorch.folder import linear_codes, signed_codes
from pippin.targets.executorch.layers import (
    PlainEmbedding,
    PlainLinear,
    QuantizedEmbedding,
    QuantizedLinear,
    RMSNorm,
    Rotation,
    fake_quantize,
)
from pippin.targets.folder import Folder
from pippin.targets.portable import UNSEEN

# The first slot of a call's tokens; what is added to their scores, where a window hides slots.
Place: TypeAlias = tuple[int, Tensor | None]


class Cache(nn.Module):
    """Keys and values of one layer, (1, S, K, C) each, and the attention that reads them."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.scale = shape.attention_scale
        size = (1, shape.context, shape.num_kv_heads, shape.head_dim)
        self.register_buffer("keys", torch.zeros(size), persistent=False)
        self.register_buffer("values", torch.zeros(size), persistent=False)

    def forward(self, q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, place: Place) -> Tensor:
        """Write T tokens at their place, then attend causally; (B, T, H, C) to the same."""
        ops, (start, mask_TS) = torch.ops.llama, place
        ops.update_cache(k_BTKC, self.keys, start)
        ops.update_cache(v_BTKC, self.values, start)
        causal = mask_TS is None
        return ops.custom_sdpa(
            q_BTHC, self.keys, self.values, start, mask_TS, 0.0, causal, self.scale
        )


class XnnpackParts:
    """Parts over exact integer codes; see targets.decoder.Parts.

    `noise` is what activations differ by before they are rounded, relative to each; 0 but where a
    check asks what rounding makes of it.
    """

    norm, rotation, cache = RMSNorm, Rotation, Cache

    def __init__(self) -> None:
        self.noise = 0.0

    def place(self, shape: Shape, start: int, length: int, window: int | None) -> Place:
        """The first slot: the caches' operators mask themselves what no window hides."""
        if window is None:
            return start, None
        slots_S = torch.arange(shape.context)
        back_TS = slots_S[start : start + length, None] - slots_S
        seen_TS = (back_TS >= 0) & (back_TS < window)
        return start, (seen_TS.float() - 1) * UNSEEN

    def linear(self, folder: Folder, name: str) -> nn.Module:
        """The linear `name` with its bias, quantized or plain as the folder stores it."""
        bias_O = folder.optional(f"{name}.bias")
        if not folder.is_quantized(name):
            return PlainLinear(folder.plain(f"{name}.weight"), bias_O)
        found = linear_codes(folder, name)
        return QuantizedLinear(found.codes_OD, found.scales_OG, found.bits, bias_O)

    def embedding(self, folder: Folder, name: str) -> nn.Module:
        """The token embedding, quantized or plain as the folder stores it."""
        if not folder.is_quantized(name):
            return PlainEmbedding(folder.plain(f"{name}.weight"))
        found = signed_codes(folder, name)
        return QuantizedEmbedding(found.codes_OD, found.scales_OG, found.bits)

    def inputs(self, linears: tuple[nn.Module, ...], x_BTD: Tensor) -> list[Tensor]:
        """The input, fake-quantized once for all linears that want it."""
        wanted = [bool(linear.quantized) for linear in linears]
        if self.noise:
            x_BTD = x_BTD * (1 + self.noise * torch.randn_like(x_BTD))
        rounded_BTD = fake_quantize(x_BTD) if any(wanted) else x_BTD
        return [rounded_BTD if want else x_BTD for want in wanted]


def read_weights(folder: Folder, context: int) -> Weights:
    """The folder's weights in these parts; context in tokens."""
    return Weights(XnnpackParts(), folder, context)
