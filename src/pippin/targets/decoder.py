"""The Llama family as one exportable module whose KV caches are buffers updated in place.

Targets share it and bring their own parts: linears, embedding, norm, rotation and cache in the
forms that their runtime takes.

Shape letters: B batch (1), T tokens, D hidden, F feed-forward, H heads, K kv heads, C head
channels, V vocab, S slots of the cache (the context).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from pippin.model.config import ModelConfig
from pippin.targets.folder import Folder

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


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


class Parts(Protocol):
    """What differs between runtimes."""

    def linear(self, folder: Folder, name: str) -> nn.Module:
        """The linear `name` with its bias; `inputs` has prepared what it reads."""
        ...

    def embedding(self, folder: Folder, name: str) -> nn.Module:
        """The token embedding: (B, T) int64 to (B, T, D) float32."""
        ...

    def norm(self, weight_D: Tensor, eps: float) -> nn.Module:
        """RMSNorm over the last axis."""
        ...

    def rotation(self, head_dim: int) -> nn.Module:
        """forward(x_BTHC, cos_BT1C, sin_BT1C): rotary position embedding."""
        ...

    def cache(self, shape: Shape) -> nn.Module:
        """forward(q_BTHC, k_BTKC, v_BTKC, start): write from slot `start` on, attend causally."""
        ...

    def inputs(self, linears: tuple[nn.Module, ...], x_BTD: Tensor) -> list[Tensor]:
        """What each of some linears reads of one input."""
        ...


class Attention(nn.Module):
    """Self-attention with grouped queries; query and key norms where the folder has them."""

    def __init__(self, parts: Parts, folder: Folder, name: str, shape: Shape):
        super().__init__()
        self.parts, self.shape = parts, shape
        self.q_proj = parts.linear(folder, f"{name}.q_proj")
        self.k_proj = parts.linear(folder, f"{name}.k_proj")
        self.v_proj = parts.linear(folder, f"{name}.v_proj")
        self.o_proj = parts.linear(folder, f"{name}.o_proj")
        self.q_norm = _optional_norm(parts, folder, f"{name}.q_norm", shape)
        self.k_norm = _optional_norm(parts, folder, f"{name}.k_norm", shape)
        self.rotation = parts.rotation(shape.head_dim)

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], cache: nn.Module, start: int):
        """(B, T, D) to (B, T, D)."""
        q_BTX, k_BTX, v_BTX = _apply(self.parts, (self.q_proj, self.k_proj, self.v_proj), x_BTD)
        # A literal -1 keeps the reshape inside XNNPACK, which takes no symbolic sizes.
        q_BTHC = self.q_norm(q_BTX.view(1, -1, self.shape.num_heads, self.shape.head_dim))
        k_BTKC = self.k_norm(k_BTX.view(1, -1, self.shape.num_kv_heads, self.shape.head_dim))
        v_BTKC = v_BTX.view(1, -1, self.shape.num_kv_heads, self.shape.head_dim)
        q_BTHC, k_BTKC = self.rotation(q_BTHC, *rope), self.rotation(k_BTKC, *rope)
        mixed_BTHC = cache(q_BTHC, k_BTKC, v_BTKC, start)
        (out_BTD,) = _apply(self.parts, (self.o_proj,), mixed_BTHC.view(1, -1, q_BTX.shape[-1]))
        return out_BTD


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, parts: Parts, folder: Folder, name: str):
        super().__init__()
        self.parts = parts
        self.gate_proj = parts.linear(folder, f"{name}.gate_proj")
        self.up_proj = parts.linear(folder, f"{name}.up_proj")
        self.down_proj = parts.linear(folder, f"{name}.down_proj")

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        gate_BTF, up_BTF = _apply(self.parts, (self.gate_proj, self.up_proj), x_BTD)
        # silu is written out: an operator that has to be decomposed costs a rewrite of the graph.
        (out_BTD,) = _apply(
            self.parts, (self.down_proj,), gate_BTF * torch.sigmoid(gate_BTF) * up_BTF
        )
        return out_BTD


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, parts: Parts, folder: Folder, name: str, shape: Shape):
        super().__init__()
        eps, after = shape.norm_eps, f"{name}.post_attention_layernorm.weight"
        self.input_norm = parts.norm(folder.plain(f"{name}.input_layernorm.weight"), eps)
        self.attention = Attention(parts, folder, f"{name}.self_attn", shape)
        self.post_norm = parts.norm(folder.plain(after), eps)
        self.feed_forward = FeedForward(parts, folder, f"{name}.mlp")

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], cache: nn.Module, start: int):
        """(B, T, D) to (B, T, D)."""
        x_BTD = x_BTD + self.attention(self.input_norm(x_BTD), rope, cache, start)
        return x_BTD + self.feed_forward(self.post_norm(x_BTD))


class Weights(nn.Module):
    """Everything a decoder reads and never writes; several programs share one."""

    cos: Tensor
    sin: Tensor

    def __init__(self, parts: Parts, folder: Folder, context: int):
        super().__init__()
        self.parts, self.shape = parts, read_shape(folder.config, context)
        self.embedding = parts.embedding(folder, EMBEDDING)
        names = [f"model.layers.{i}" for i in range(self.shape.num_layers)]
        self.layers = nn.ModuleList(Layer(parts, folder, name, self.shape) for name in names)
        self.norm = parts.norm(folder.plain("model.norm.weight"), self.shape.norm_eps)
        self.head = parts.linear(folder, EMBEDDING if folder.config.tied_embeddings else HEAD)
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
        shape = weights.shape
        self.caches = nn.ModuleList(weights.parts.cache(shape) for _ in range(shape.num_layers))

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
        (logits,) = _apply(self.weights.parts, (self.weights.head,), x_BTD)
        return logits


def _apply(parts: Parts, linears: tuple[nn.Module, ...], x_BTD: Tensor) -> list[Tensor]:
    read = parts.inputs(linears, x_BTD)
    return [linear(x) for linear, x in zip(linears, read, strict=True)]


def _optional_norm(parts: Parts, folder: Folder, name: str, shape: Shape) -> nn.Module:
    weight_C = folder.optional(f"{name}.weight")
    return nn.Identity() if weight_C is None else parts.norm(weight_C, shape.norm_eps)


def rope_tables(path: Path, context: int) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, (S, C) float32 each, scaled as the model's rope type asks."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = AutoConfig.from_pretrained(path, local_files_only=True)
    positions = torch.arange(context)[None]
    cos_BSC, sin_BSC = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    return cos_BSC[0].clone(), sin_BSC[0].clone()
