"""The Llama and Gemma families as one exportable module whose KV caches are updated in place.

Targets share it and bring their own parts: linears, embedding, norm, rotation and cache in the
forms that their runtime takes.

Shape letters: B batch (1), T tokens, D hidden, F feed-forward, H heads, K kv heads, C head
channels, V vocab, N wanted positions, S slots of the cache (the context).
"""

import math
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from pippin.targets.folder import Folder
from pippin.targets.shape import Shape, read_shape, rope_tables

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
Rotary: TypeAlias = tuple[Tensor, Tensor]  # cos and sin, (B, T, 1, C) each
Heads: TypeAlias = tuple[Tensor, Tensor, Tensor]
Where: TypeAlias = tuple[Rotary, Any]


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

    def place(self, shape: Shape, start: int, length: int, window: int | None) -> Any:
        """Where a call's tokens go and what they see, for every layer with this window."""
        ...

    def cache(self, shape: Shape) -> nn.Module:
        """forward(q_BTHC, k_BTKC, v_BTKC, place): write the tokens, attend causally."""
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
        normed = folder.optional(f"{name}.q_norm.weight") is not None
        self.q_norm = _norm(parts, folder, f"{name}.q_norm", shape, asked=normed)
        self.k_norm = _norm(parts, folder, f"{name}.k_norm", shape, asked=normed)
        self.rotation = parts.rotation(shape.head_dim)

    def before(self, x_BTD: Tensor, rope: Rotary) -> Heads:
        """Queries (B, T, H, C), keys and values (B, T, K, C) each, for the layer's cache."""
        q_BTX, k_BTX, v_BTX = _apply(self.parts, (self.q_proj, self.k_proj, self.v_proj), x_BTD)
        # A literal -1 keeps the reshape inside XNNPACK, which takes no symbolic sizes.
        q_BTHC = self.q_norm(q_BTX.view(1, -1, self.shape.num_heads, self.shape.head_dim))
        k_BTKC = self.k_norm(k_BTX.view(1, -1, self.shape.num_kv_heads, self.shape.head_dim))
        v_BTKC = v_BTX.view(1, -1, self.shape.num_kv_heads, self.shape.head_dim)
        return self.rotation(q_BTHC, *rope), self.rotation(k_BTKC, *rope), v_BTKC

    def after(self, mixed_BTHC: Tensor) -> Tensor:
        """What the cache made of them, to (B, T, D)."""
        width = self.shape.num_heads * self.shape.head_dim
        (out_BTD,) = _apply(self.parts, (self.o_proj,), mixed_BTHC.view(1, -1, width))
        return out_BTD


class FeedForward(nn.Module):
    """down(act(gate(x)) * up(x)): silu, or Gemma's GELU by tanh."""

    def __init__(self, parts: Parts, folder: Folder, name: str, shape: Shape):
        super().__init__()
        self.parts, self.is_gemma = parts, shape.is_gemma
        self.gate_proj = parts.linear(folder, f"{name}.gate_proj")
        self.up_proj = parts.linear(folder, f"{name}.up_proj")
        self.down_proj = parts.linear(folder, f"{name}.down_proj")

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        gate_BTF, up_BTF = _apply(self.parts, (self.gate_proj, self.up_proj), x_BTD)
        # silu is written out: an operator that has to be decomposed costs a rewrite of the graph.
        act_BTF = _gelu(gate_BTF) if self.is_gemma else gate_BTF * torch.sigmoid(gate_BTF)
        (out_BTD,) = _apply(self.parts, (self.down_proj,), act_BTF * up_BTF)
        return out_BTD


class Layer(nn.Module):
    """One pre-norm decoder layer; Gemma 2 and 3 have norms behind both of its parts as well.

    Its cache, which does the attending, belongs to a Decoder.
    """

    def __init__(self, parts: Parts, folder: Folder, name: str, shape: Shape):
        super().__init__()
        before, after = "pre_feedforward_layernorm", "post_attention_layernorm"
        inner = folder.optional(f"{name}.{before}.weight") is not None
        self.input_norm = _norm(parts, folder, f"{name}.input_layernorm", shape)
        self.attention = Attention(parts, folder, f"{name}.self_attn", shape)
        self.attended_norm = _norm(parts, folder, f"{name}.{after}", shape, asked=inner)
        self.post_norm = _norm(parts, folder, f"{name}.{before if inner else after}", shape)
        self.feed_forward = FeedForward(parts, folder, f"{name}.mlp", shape)
        self.fed_norm = _norm(
            parts, folder, f"{name}.post_feedforward_layernorm", shape, asked=inner
        )

    def before(self, x_BTD: Tensor, rope: Rotary) -> Heads:
        """What goes into the cache; see Attention.before."""
        return self.attention.before(self.input_norm(x_BTD), rope)

    def after(self, x_BTD: Tensor, mixed_BTHC: Tensor) -> Tensor:
        """The layer's output (B, T, D), of its input and what its cache made of it."""
        x_BTD = x_BTD + self.attended_norm(self.attention.after(mixed_BTHC))
        return x_BTD + self.fed_norm(self.feed_forward(self.post_norm(x_BTD)))


class Rope(nn.Module):
    """cos and sin of every position, (S, C) each."""

    cos: Tensor
    sin: Tensor

    def __init__(self, cos_SC: Tensor, sin_SC: Tensor):
        super().__init__()
        self.register_buffer("cos", cos_SC)
        self.register_buffer("sin", sin_SC)

    def forward(self, start: int, length: int) -> Rotary:
        """Those of some positions, (B, T, 1, C) each."""
        size = (1, -1, 1, self.cos.shape[1])
        return self.cos[start : start + length].view(size), self.sin[start : start + length].view(
            size
        )


class Entry(nn.Module):
    """What comes before the layers: vectors of tokens, rotations, places in the caches."""

    def __init__(self, parts: Parts, folder: Folder, shape: Shape):
        super().__init__()
        self.parts, self.shape = parts, shape
        self.embedding = parts.embedding(folder, EMBEDDING)
        tables = (rope_tables(folder.path, shape.context, window) for window in shape.kinds)
        self.ropes = nn.ModuleList(Rope(*table) for table in tables)

    def forward(self, tokens_BT: Tensor, input_pos: Tensor) -> tuple[Tensor, list[Where]]:
        """Vectors (B, T, D) of tokens from position input_pos on, and where each layer has them."""
        start: Any = input_pos[0].item()
        length = tokens_BT.shape[1]
        torch._check(start >= 0)
        torch._check(start + length <= self.shape.context)
        where = {
            window: (rope(start, length), self.parts.place(self.shape, start, length, window))
            for window, rope in zip(self.shape.kinds, self.ropes, strict=True)
        }
        x_BTD = self.embedding(tokens_BT)
        if self.shape.is_gemma:
            x_BTD = x_BTD * self.shape.embed_scale
        return x_BTD, [where[window] for window in self.shape.windows]


class Exit(nn.Module):
    """What comes after the layers: (.., D) to logits (.., V)."""

    def __init__(self, parts: Parts, folder: Folder, shape: Shape):
        super().__init__()
        self.parts, self.logit_cap = parts, shape.logit_cap
        self.norm = _norm(parts, folder, "model.norm", shape)
        self.head = parts.linear(folder, EMBEDDING if folder.config.tied_embeddings else HEAD)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(.., D) to (.., V)."""
        (logits,) = _apply(self.parts, (self.head,), self.norm(x_BTD))
        return logits if self.logit_cap is None else _capped(logits, self.logit_cap)


class Weights(nn.Module):
    """Everything a decoder reads and never writes; several programs share one."""

    def __init__(self, parts: Parts, folder: Folder, context: int):
        super().__init__()
        self.parts, self.shape = parts, read_shape(folder.config, context)
        self.entry = Entry(parts, folder, self.shape)
        names = [f"model.layers.{i}" for i in range(self.shape.num_layers)]
        self.layers: Any = nn.ModuleList(Layer(parts, folder, name, self.shape) for name in names)
        self.exit = Exit(parts, folder, self.shape)


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

    def forward(
        self, tokens_BT: Tensor, input_pos: Tensor, wanted_N: Tensor | None = None
    ) -> Tensor:
        """Logits of the tokens, which sit at positions input_pos, input_pos + 1, ...

        `wanted_N` asks for those of some of the given tokens alone, (1, N, V).
        """
        x_BTD, where = self.weights.entry(tokens_BT, input_pos)
        for layer, cache, (rope, place) in zip(
            self.weights.layers, self.caches, where, strict=True
        ):
            mixed_BTHC = cache(*layer.before(x_BTD, rope), place)
            x_BTD = layer.after(x_BTD, mixed_BTHC)
        if wanted_N is not None:
            x_BTD = x_BTD[:, wanted_N]
        return self.weights.exit(x_BTD if self.every else x_BTD[:, -1, :])


def _apply(parts: Parts, linears: tuple[nn.Module, ...], x_BTD: Tensor) -> list[Tensor]:
    read = parts.inputs(linears, x_BTD)
    return [linear(x) for linear, x in zip(linears, read, strict=True)]


def _norm(parts: Parts, folder: Folder, name: str, shape: Shape, asked: bool = True) -> nn.Module:
    if not asked:
        return nn.Identity()
    weight_D = folder.plain(f"{name}.weight")
    return parts.norm(weight_D + 1 if shape.is_gemma else weight_D, shape.norm_eps)


def _capped(logits: Tensor, cap: float) -> Tensor:
    return torch.tanh(logits / cap) * cap


def _gelu(x_BTF: Tensor) -> Tensor:
    # Written out: coremltools 9 makes PyTorch's operator the exact GELU, whatever it is asked for.
    # Its ones are floats: XNNPACK adds no others.
    inner_BTF = x_BTF * (1.0 + 0.044715 * x_BTF * x_BTF) * math.sqrt(2 / math.pi)
    return 0.5 * x_BTF * (1.0 + torch.tanh(inner_BTF))
