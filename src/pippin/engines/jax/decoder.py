"""The decoder of the Llama family as pure functions: layers stacked, scanned, compiled once.

Shape letters: B rows, T tokens, S tokens or cache slots that are attended to, D hidden, H heads, K
kv heads, G queries a kv head, C head channels, L layers, I inputs, O outputs, R rank, V vocabulary,
Q kinds of rope.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from pippin.engines.jax.architecture import Spec

# {"embed": (V, D), "norm": (D,), "head": (V, D) unless tied, "layers": {name: (L, ...)}}
Params: TypeAlias = dict[str, Any]
# By linear within a layer: A (L, R, I) and B (L, O, R), B already scaled.
Lora: TypeAlias = dict[str, tuple[Array, Array]]
Project: TypeAlias = Callable[[str, Array], Array]
Attend: TypeAlias = Callable[[Array, Array, Array], Array]

EXACT = lax.Precision.HIGHEST  # float32 products stay float32 on hardware that would round them
BLOCK, BLOCKS = 128, 8  # fewest queries whose scores exist at once, most blocks of a row


@dataclass(frozen=True, kw_only=True, slots=True)
class How:
    """What a pass does besides computing: `dropout` of the adapter's inputs, `remat` of layers."""

    dropout: float = 0.0
    remat: bool = False


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
    keys = None if key is None else jax.random.split(key, spec.num_layers)

    def step(x_BTD: Array, per: Any) -> tuple[Array, None]:
        weights, pairs, fact, drawn = per
        tools = Tools(
            turn=turns.of(fact),
            attend=row_attention(spec, rows.segments_BT, fact.window),
            project=linears(weights, pairs, how.dropout, drawn),
        )
        return layer(spec, weights, x_BTD, tools), None

    policies = jax.checkpoint_policies
    kept = policies.save_from_both_policies(
        policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names("attended")
    )
    again = jax.checkpoint(step, prevent_cse=False, policy=None if how.remat else kept)
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
    wide_BTF = activate(project("mlp.gate_proj", h_BTD)) * project("mlp.up_proj", h_BTD)
    y_BTD = project("mlp.down_proj", wide_BTF)
    if spec.post_norms:
        y_BTD = norm(spec, y_BTD, weights["post_feedforward_layernorm.weight"])
    return x_BTD + y_BTD


def linears(weights: Params, lora: Lora, dropout: float = 0.0, key: Array | None = None) -> Project:
    """x W^T + bias + dropout(x) A^T B^T of one layer's linears, by name."""

    def project(name: str, x: Array) -> Array:
        y = jnp.matmul(x, plain(weights[f"{name}.weight"]).T, precision=EXACT)
        if f"{name}.bias" in weights:
            y = y + weights[f"{name}.bias"]
        if name not in lora:
            return y
        a_RI, b_OR = (side.astype(x.dtype) for side in lora[name])
        if dropout and key is not None:
            x = _drop(x, dropout, jax.random.fold_in(key, sorted(lora).index(name)))
        z_BTR = jnp.matmul(x, a_RI.T, precision=EXACT)
        return y + jnp.matmul(z_BTR, b_OR.T, precision=EXACT)

    return project


def plain(weight: Array) -> Array:
    """A weight that is held as the bits of bfloat16, or as it is."""
    return lax.bitcast_convert_type(weight, jnp.bfloat16) if weight.dtype == jnp.uint16 else weight


def _drop(x: Array, dropout: float, key: Array) -> Array:
    kept = jax.random.bernoulli(key, 1.0 - dropout, x.shape)
    return jnp.where(kept, x / (1.0 - dropout), 0).astype(x.dtype)


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


def row_attention(spec: Spec, segments_BT: Array, window: Array) -> Attend:
    """Exact attention over packed rows, a block of queries at a time.

    A block whose samples begin in it or in the block before looks at these two alone, another one
    at all keys up to its end. Scores are computed again for the backward pass: memory is that of
    one block.
    """
    length = segments_BT.shape[1]
    block = max(BLOCK, -(-length // BLOCKS))

    @partial(jax.checkpoint, static_argnums=(3, 4), prevent_cse=False)
    def among(q: Array, k: Array, v: Array, start: int, first: int) -> Array:
        """`q` from column `start` on, keys from column `first` on."""
        query_T, key_S = start + jnp.arange(q.shape[1]), first + jnp.arange(k.shape[1])
        distance_TS = query_T[:, None] - key_S[None]
        seen_TS = (distance_TS >= 0) & (distance_TS < window)
        same_BTS = segments_BT[:, query_T, None] == segments_BT[:, None, key_S]
        return scores_to_values(spec, q, k, v, seen_TS[None] & same_BTS)

    def attend_block(q: Array, k: Array, v: Array, start: int) -> Array:
        first, stop = max(0, start - block), min(start + block, length)
        sides = q[:, start:stop], k[:, :stop], v[:, :stop]
        if first == 0:
            return among(*sides, start, 0)
        begins = segments_BT[:, start]
        longer = ((begins == segments_BT[:, first - 1]) & (begins > 0)).any()
        return lax.cond(
            longer,
            lambda q, k, v: among(q, k, v, start, 0),
            lambda q, k, v: among(q, k[:, first:], v[:, first:], start, first),
            *sides,
        )

    def attend(q: Array, k: Array, v: Array) -> Array:
        outs = [attend_block(q, k, v, start) for start in range(0, length, block)]
        return checkpoint_name(jnp.concatenate(outs, 1), "attended")

    return attend


def scores_to_values(spec: Spec, q: Array, k: Array, v: Array, seen_BTS: Array) -> Array:
    """(B, T, H, C) x (B, S, K, C) -> (B, T, H, C); softmax in float32 over what is seen.

    The queries of a kv head are the rows of one product.
    """
    (b, t, _, c), s, kv = q.shape, k.shape[1], spec.num_kv_heads
    grouped = q.reshape(b, t, kv, -1, c).transpose(0, 2, 3, 1, 4).reshape(b, kv, -1, c)
    keys, values = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
    scores = exact_product(grouped, keys).reshape(b, kv, -1, t, s) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * jnp.tanh(scores / spec.softcap)
    scores = jnp.where(seen_BTS[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, -1).astype(v.dtype).reshape(b, kv, -1, s)
    out = jnp.matmul(weights, values, precision=EXACT).reshape(b, kv, -1, t, c)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape)


def exact_product(a: Array, b: Array) -> Array:
    """a @ b, summed and returned in float32."""
    return jnp.matmul(a, b, precision=EXACT, preferred_element_type=jnp.float32)


def head_weight(params: Params) -> Array:
    """(V, D): the embedding where the head is tied to it."""
    return params.get("head", params["embed"])


def logits(spec: Spec, weight_VD: Array, hidden: Array) -> Array:
    """(..., V) in float32, soft-capped where the model does it."""
    products = jnp.matmul(hidden, weight_VD.T, precision=EXACT).astype(jnp.float32)
    if spec.head_softcap is None:
        return products
    return spec.head_softcap * jnp.tanh(products / spec.head_softcap)
