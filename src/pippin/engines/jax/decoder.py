"""The decoder of the Llama family as pure functions: layers stacked, scanned, compiled once.

Shape letters: B rows, T tokens, S tokens or cache slots that are attended to, D hidden, H heads, K
kv heads, G queries a kv head, C head channels, L layers, I inputs, O outputs, R rank, V vocabulary,
Q kinds of rope.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from pippin.engines.jax.architecture import Spec
from pippin.engines.jax.attention import Attend, cudnn_attention, row_attention, saves
from pippin.engines.jax.products import EXACT, Lora, Project, linears

# {"embed": (V, D), "norm": (D,), "head": (V, D) unless tied, "layers": {name: (L, ...)}}
Params: TypeAlias = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class How:
    """How a pass is made: adapters' `dropout`, `remat` of layers, whether by `cudnn_attention`."""

    dropout: float = 0.0
    remat: bool = False
    cudnn: bool = False


class Net(NamedTuple):
    """What is computed with: the weights, and the adapter beside them (empty for none)."""

    params: Params
    lora: Lora


class Tools(NamedTuple):
    """What a layer works with: its cosines and sines, its attention, its linears."""

    turn: tuple[Array, Array]
    attend: Attend
    project: Project


class Rows(NamedTuple):
    """Packed rows, int32 (B, T) each. A token attends to its own segment's past alone."""

    tokens_BT: Array
    positions_BT: Array
    segments_BT: Array


class Facts(NamedTuple):
    """What differs from layer to layer besides the weights."""

    window: Array
    rope: Array


def facts(spec: Spec) -> Facts:
    """By layer, (L,) each."""
    return Facts(jnp.array(spec.windows, jnp.int32), jnp.array(spec.rope_of, jnp.int32))


def hidden_states(
    spec: Spec, net: Net, rows: Rows, how: How = How(), key: Array | None = None
) -> Array:
    """(B, T, D) after the last norm: what the head reads. `key` draws dropout's masks."""
    turns = rotations(spec, rows.positions_BT, net.params["embed"].dtype)
    attention = cudnn_attention if how.cudnn else row_attention
    keys = None if key is None else jax.random.split(key, spec.num_layers)

    def step(x_BTD: Array, per: Any) -> tuple[Array, None]:
        weights, pairs, fact, drawn = per
        tools = Tools(
            turn=turns.of(fact),
            attend=attention(spec, rows.segments_BT, fact.window),
            project=linears(weights, pairs, how.dropout, drawn),
        )
        return layer(spec, weights, x_BTD, tools), None

    again = jax.checkpoint(step, prevent_cse=False, policy=None if how.remat else saves)
    per_layer = (net.params["layers"], net.lora, facts(spec), keys)
    x_BTD, _ = lax.scan(again, embed(spec, net.params, rows.tokens_BT), per_layer)
    return norm(spec, x_BTD, net.params["norm"])


def embed(spec: Spec, params: Params, tokens_BT: Array) -> Array:
    """(B, T, D); Gemma scales it in the weights' dtype."""
    x_BTD = params["embed"][tokens_BT]
    return x_BTD if spec.embed_scale == 1.0 else x_BTD * jnp.asarray(spec.embed_scale, x_BTD.dtype)


def layer(spec: Spec, weights: Params, x_BTD: Array, tools: Tools) -> Array:
    """One decoder layer: attention and feed-forward, each with its norms and residual."""
    turn, attend, project = tools
    h_BTD = norm(spec, x_BTD, weights["input_layernorm.weight"])
    q, k, v = (_heads(spec, project(f"self_attn.{part}_proj", h_BTD)) for part in "qkv")
    if spec.qk_norms:
        q = norm(spec, q, weights["self_attn.q_norm.weight"])
        k = norm(spec, k, weights["self_attn.k_norm.weight"])
    attended_BTHC = attend(rotate(spec, q, turn), rotate(spec, k, turn), v)
    y_BTD = project("self_attn.o_proj", attended_BTHC.reshape(*x_BTD.shape[:2], -1))
    if spec.post_norms:
        y_BTD = norm(spec, y_BTD, weights["post_attention_layernorm.weight"])
    x_BTD = x_BTD + y_BTD
    before = "pre_feedforward" if spec.post_norms else "post_attention"
    h_BTD = norm(spec, x_BTD, weights[f"{before}_layernorm.weight"])
    activate = jax.nn.silu if spec.activation == "silu" else jax.nn.gelu
    gate_BTF = activate(project("mlp.gate_proj", h_BTD).astype(jnp.float32)).astype(h_BTD.dtype)
    wide_BTF = gate_BTF * project("mlp.up_proj", h_BTD)
    y_BTD = project("mlp.down_proj", wide_BTF)
    if spec.post_norms:
        y_BTD = norm(spec, y_BTD, weights["post_feedforward_layernorm.weight"])
    return x_BTD + y_BTD


def _heads(spec: Spec, x: Array) -> Array:
    return x.reshape(*x.shape[:2], -1, spec.head_dim)


def norm(spec: Spec, x: Array, weight: Array) -> Array:
    """RMS norm over the last axis in float32; Gemma's scales by 1 + weight before it rounds."""
    exact = x.astype(jnp.float32)
    exact = exact * lax.rsqrt(jnp.mean(exact * exact, -1, keepdims=True) + spec.eps)
    if spec.gemma_norms:
        return (exact * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)
    return weight * exact.astype(x.dtype)


class Rotations(NamedTuple):
    """Cosines and sines (Q, B, T, 1, C) of every kind of rope."""

    cos: Array
    sin: Array

    def of(self, fact: Facts) -> tuple[Array, Array]:
        """Those of a layer, (B, T, 1, C)."""
        return self.cos[fact.rope], self.sin[fact.rope]


def rotations(spec: Spec, positions_BT: Array, dtype: Any) -> Rotations:
    """Angles are computed in float32, then rounded to `dtype`."""
    frequencies = jnp.array([rope.frequencies for rope in spec.ropes], jnp.float32)
    factors = jnp.array([rope.factor for rope in spec.ropes], jnp.float32)
    angles = (
        positions_BT[None, :, :, None, None].astype(jnp.float32) * frequencies[:, None, None, None]
    )
    angles = jnp.repeat(angles, 2, -1) if spec.interleaved else jnp.concatenate([angles] * 2, -1)
    scale = factors[:, None, None, None, None]
    return Rotations(
        (jnp.cos(angles) * scale).astype(dtype), (jnp.sin(angles) * scale).astype(dtype)
    )


def rotate(spec: Spec, x: Array, turn: tuple[Array, Array]) -> Array:
    """Turn channel i with channel i + C/2, or channels 2i and 2i + 1 with each other."""
    if spec.interleaved:
        turned = jnp.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
    else:
        left, right = jnp.split(x, 2, -1)
        turned = jnp.concatenate([-right, left], -1)
    return x * turn[0] + turned * turn[1]


def head_weight(params: Params) -> Array:
    """(V, D): the embedding where the head is tied to it."""
    return params.get("head", params["embed"])


def logits(spec: Spec, weight_VD: Array, hidden: Array) -> Array:
    """(..., V) in float32, soft-capped where the model does it."""
    products = jnp.matmul(hidden, weight_VD.T, precision=EXACT).astype(jnp.float32)
    if spec.head_softcap is None:
        return products
    return spec.head_softcap * jnp.tanh(products / spec.head_softcap)
