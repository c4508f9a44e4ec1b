"""The Llama family as one exportable module whose KV caches are buffers updated in place.

Shape letters: B batch (1), T tokens, D hidden, F feed-forward, H heads, K kv heads, C head
channels, V vocab, S slots of the cache (the context).
"""

from dataclasses import dataclass
from pathlib import Path

# The library with llama.update_cache and llama.custom_sdpa; importing it is what defines them.
import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401
import torch
from torch import Tensor, nn

from pippin.model.config import ModelConfig
from pippin.targets.executorch.folder import Folder
from pippin.targets.executorch.layers import (
    PlainEmbedding,
    PlainLinear,
    QuantizedEmbedding,
    QuantizedLinear,
    RMSNorm,
    Rotation,
    fake_quantize,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The numbers of a decoder that its modules need."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    context: int


def read_shape(config: ModelConfig, context: int) -> Shape:
    """The numbers of a config; context in tokens."""
    return Shape(
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        norm_eps=config.raw.get("rms_norm_eps", 1e-6),
        context=context,
    )


class Cache(nn.Module):
    """Keys and values of one layer, (1, S, K, C) each, and the attention that reads them."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.scale = shape.head_dim**-0.5
        size = (1, shape.context, shape.num_kv_heads, shape.head_dim)
        self.register_buffer("keys", torch.zeros(size), persistent=False)
        self.register_buffer("values", torch.zeros(size), persistent=False)

    def forward(self, q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, start: int) -> Tensor:
        """Write T tokens from slot `start` on, then attend causally; (B, T, H, C) to the same."""
        ops = torch.ops.llama
        ops.update_cache(k_BTKC, self.keys, start)
        ops.update_cache(v_BTKC, self.values, start)
        return ops.custom_sdpa(q_BTHC, self.keys, self.values, start, None, 0.0, True, self.scale)


class Attention(nn.Module):
    """Self-attention with grouped queries; query and key norms where the folder has them."""

    def __init__(self, folder: Folder, name: str, shape: Shape):
        super().__init__()
        self.shape = shape
        self.q_proj = read_linear(folder, f"{name}.q_proj")
        self.k_proj = read_linear(folder, f"{name}.k_proj")
        self.v_proj = read_linear(folder, f"{name}.v_proj")
        self.o_proj = read_linear(folder, f"{name}.o_proj")
        self.q_norm = read_optional_norm(folder, f"{name}.q_norm", shape)
        self.k_norm = read_optional_norm(folder, f"{name}.k_norm", shape)
        self.rotation = Rotation(shape.head_dim)

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], cache: Cache, start: int):
        """(B, T, D) to (B, T, D)."""
        q_BTX, k_BTX, v_BTX = apply((self.q_proj, self.k_proj, self.v_proj), x_BTD)
        # A literal -1 keeps the reshape inside XNNPACK, which takes no symbolic sizes.
        q_BTHC = self.q_norm(q_BTX.view(1, -1, self.shape.num_heads, self.shape.head_dim))
        k_BTKC = self.k_norm(k_BTX.view(1, -1, self.shape.num_kv_heads, self.shape.head_dim))
        v_BTKC = v_BTX.view(1, -1, self.shape.num_kv_heads, self.shape.head_dim)
        q_BTHC, k_BTKC = self.rotation(q_BTHC, *rope), self.rotation(k_BTKC, *rope)
        mixed_BTHC = cache(q_BTHC, k_BTKC, v_BTKC, start)
        (out_BTD,) = apply((self.o_proj,), mixed_BTHC.view(1, -1, q_BTX.shape[-1]))
        return out_BTD


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, folder: Folder, name: str):
        super().__init__()
        self.gate_proj = read_linear(folder, f"{name}.gate_proj")
        self.up_proj = read_linear(folder, f"{name}.up_proj")
        self.down_proj = read_linear(folder, f"{name}.down_proj")

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        gate_BTF, up_BTF = apply((self.gate_proj, self.up_proj), x_BTD)
        # silu is written out: an operator that has to be decomposed costs a rewrite of the graph.
        (out_BTD,) = apply((self.down_proj,), gate_BTF * torch.sigmoid(gate_BTF) * up_BTF)
        return out_BTD


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, folder: Folder, name: str, shape: Shape):
        super().__init__()
        eps = shape.norm_eps
        self.input_norm = RMSNorm(folder.plain(f"{name}.input_layernorm.weight"), eps)
        self.attention = Attention(folder, f"{name}.self_attn", shape)
        self.post_norm = RMSNorm(folder.plain(f"{name}.post_attention_layernorm.weight"), eps)
        self.feed_forward = FeedForward(folder, f"{name}.mlp")

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], cache: Cache, start: int):
        """(B, T, D) to (B, T, D)."""
        x_BTD = x_BTD + self.attention(self.input_norm(x_BTD), rope, cache, start)
        return x_BTD + self.feed_forward(self.post_norm(x_BTD))


class Weights(nn.Module):
    """Everything a decoder reads and never writes; several programs share one."""

    cos: Tensor
    sin: Tensor

    def __init__(self, folder: Folder, context: int):
        super().__init__()
        self.shape = read_shape(folder.config, context)
        self.embedding = read_embedding(folder)
        names = [f"model.layers.{i}" for i in range(self.shape.num_layers)]
        self.layers = nn.ModuleList(Layer(folder, name, self.shape) for name in names)
        self.norm = RMSNorm(folder.plain("model.norm.weight"), self.shape.norm_eps)
        tied = folder.config.tied_embeddings
        self.head = read_linear(folder, "model.embed_tokens" if tied else "lm_head")
        cos_SC, sin_SC = rope_tables(folder.path, context)
        self.register_buffer("cos", cos_SC)
        self.register_buffer("sin", sin_SC)


class Decoder(nn.Module):
    """forward(tokens (1, T) int64, input_pos (1,) int64) -> logits, float32.

    `every` False gives the last position's logits, (1, V), which is what phones run; True gives
    all, (1, T, V), which is what scoring reads. Each Decoder has its own caches.
    """

    def __init__(self, weights: Weights, every: bool):
        super().__init__()
        self.weights = weights
        self.every = every
        self.caches = nn.ModuleList(Cache(weights.shape) for _ in range(weights.shape.num_layers))

    def forward(self, tokens_BT: Tensor, input_pos: Tensor) -> Tensor:
        """Logits of the tokens, which sit at positions input_pos, input_pos + 1, ..."""
        start, length = input_pos[0].item(), tokens_BT.shape[1]
        context, head_dim = self.weights.shape.context, self.weights.shape.head_dim
        torch._check(start >= 0)
        torch._check(start + length <= context)
        rope = (
            self.weights.cos[start : start + length].view(1, -1, 1, head_dim),
            self.weights.sin[start : start + length].view(1, -1, 1, head_dim),
        )
        x_BTD = self.weights.embedding(tokens_BT)
        for layer, cache in zip(self.weights.layers, self.caches, strict=True):
            x_BTD = layer(x_BTD, rope, cache, start)
        x_BTD = self.weights.norm(x_BTD if self.every else x_BTD[:, -1, :])
        (logits,) = apply((self.weights.head,), x_BTD)
        return logits


def apply(linears: tuple[nn.Module, ...], x_BTD: Tensor) -> list[Tensor]:
    """Linears that read one input: it is fake-quantized once for all that want it."""
    rounded_BTD = fake_quantize(x_BTD) if any(linear.quantized for linear in linears) else x_BTD
    return [linear(rounded_BTD if linear.quantized else x_BTD) for linear in linears]


def read_linear(folder: Folder, name: str) -> nn.Module:
    """The linear `name` with its bias, quantized or plain as the folder stores it."""
    bias_O = folder.optional(f"{name}.bias")
    if not folder.is_quantized(name):
        return PlainLinear(folder.plain(f"{name}.weight"), bias_O)
    found = folder.linear_codes(name)
    return QuantizedLinear(found.codes_OD, found.scales_OG, found.bits, bias_O)


def read_embedding(folder: Folder) -> nn.Module:
    """The token embedding, quantized or plain as the folder stores it."""
    name = "model.embed_tokens"
    if not folder.is_quantized(name):
        return PlainEmbedding(folder.plain(f"{name}.weight"))
    found = folder.codes(name)
    return QuantizedEmbedding(found.codes_OD, found.scales_OG, found.bits)


def read_optional_norm(folder: Folder, name: str, shape: Shape) -> nn.Module:
    """The norm `name`, or the identity where the folder has none."""
    weight_C = folder.optional(f"{name}.weight")
    return nn.Identity() if weight_C is None else RMSNorm(weight_C, shape.norm_eps)


def rope_tables(path: Path, context: int) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, (S, C) float32 each, scaled as the model's rope type asks."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = AutoConfig.from_pretrained(path, local_files_only=True)
    positions = torch.arange(context)[None]
    cos_BSC, sin_BSC = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    return cos_BSC[0].clone(), sin_BSC[0].clone()
