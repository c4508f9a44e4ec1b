"""Attention over packed rows: a block of queries at a time, or cuDNN's kernel on a CUDA card.

Shape letters: B rows, T tokens, S tokens or cache slots that are attended to, H heads, K kv heads,
C head channels.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from pippin.engines.jax.architecture import Spec
from pippin.engines.jax.products import NARROW, NORM, PRODUCT, exact_product

Attend: TypeAlias = Callable[[Array, Array, Array], Array]

ATTENDED = "attended"
BLOCK, BLOCKS = 128, 8  # fewest queries whose scores exist at once, most blocks of a row


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
        queries_T, keys_S = start + jnp.arange(q.shape[1]), first + jnp.arange(k.shape[1])
        seen_BTS = _seen(segments_BT, window, queries_T, keys_S)
        return scores_to_values(spec, q, k, v, seen_BTS)

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
        return checkpoint_name(jnp.concatenate(outs, 1), ATTENDED)

    return attend


def cudnn_attention(spec: Spec, segments_BT: Array, window: Array) -> Attend:
    """The same by cuDNN's flash attention, with the mask as an added bias.

    It takes an even number of tokens and a multiple of 8 head channels: what is missing is zeros,
    which change no score, and tokens that nobody sees.
    """
    length = segments_BT.shape[1]
    tokens, channels = length % 2, -spec.head_dim % 8
    columns_T = jnp.arange(length + tokens)
    seen_BTS = _seen(jnp.pad(segments_BT, ((0, 0), (0, tokens))), window, columns_T, columns_T)

    def attend(q: Array, k: Array, v: Array) -> Array:
        wide = (jnp.pad(x, ((0, 0), (0, tokens), (0, 0), (0, channels))) for x in (q, k, v))
        out = jax.nn.dot_product_attention(
            *wide,
            mask=seen_BTS[:, None],
            is_causal=True,  # the mask says so too, but the kernel skips what this leaves out
            scale=spec.scale,
            implementation="cudnn",
        )
        return out[:, :length, :, : spec.head_dim]

    return attend


def has_cudnn(spec: Spec, dtype: str, device: jax.Device) -> bool:
    """Whether `cudnn_attention` computes this decoder there."""
    half = dtype in ("bfloat16", "float16")
    return device.platform == "gpu" and half and spec.head_dim <= 128 and spec.softcap is None


def saves(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """What a layer keeps for its backward pass: its linears' sums, attention, DoRA's norms.

    Not every product: a frozen weight's and the adapter's would stand beside each other.
    """
    kept = jax.checkpoint_policies.save_only_these_names(ATTENDED, PRODUCT, NARROW, NORM)
    cudnn = primitive.name.startswith("dot_product_attention_fwd")
    return cudnn or kept(primitive, *_, **parameters)


def scores_to_values(spec: Spec, q: Array, k: Array, v: Array, seen_BTS: Array) -> Array:
    """(B, T, H, C) x (B, S, K, C) -> (B, T, H, C); softmax in float32 over what is seen.

    The queries of a kv head are the rows of one product. Weights are rounded before they are
    divided by their sum, as flash kernels do it.
    """
    (b, t, _, c), s, kv = q.shape, k.shape[1], spec.num_kv_heads
    grouped = q.reshape(b, t, kv, -1, c).transpose(0, 2, 3, 1, 4).reshape(b, kv, -1, c)
    keys, values = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
    scores = exact_product(grouped, keys).reshape(b, kv, -1, t, s) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * jnp.tanh(scores / spec.softcap)
    scores = jnp.where(seen_BTS[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jnp.exp(scores - lax.stop_gradient(scores.max(-1, keepdims=True)))
    sums = weights.sum(-1, keepdims=True)
    out = exact_product(weights.astype(v.dtype).reshape(b, kv, -1, s), values)
    out = (out.reshape(b, kv, -1, t, c) / sums).astype(q.dtype)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape)


def _seen(segments_BT: Array, window: Array, queries_T: Array, keys_S: Array) -> Array:
    """(B, T, S): which keys a query sees, each by its column in the row."""
    distance_TS = queries_T[:, None] - keys_S[None]
    seen_TS = (distance_TS >= 0) & (distance_TS < window)
    return seen_TS[None] & (segments_BT[:, queries_T, None] == segments_BT[:, None, keys_S])
