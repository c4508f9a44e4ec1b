"""Probes of MLX's fused attention: masks, head widths, grouped heads, decoding, gradients.

Shape letters: B rows, H heads, K kv heads, L queries, S keys, C head channels.
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from pippin.check import Case, Shapes
from pippin.check.families import Family
from pippin.engines.mlx.probes.bench import draw, exact, gap

HEAD_DIMS = (64, 80, 96, 100, 128, 256)
LENGTHS = (1, 33, 130)
DECODED = (1, 2, 31, 257, 1023, 1024, 1025, 2049, 4097)
AROUND = 'half precision wrong: model.dtype = "float32"; float32 too: model.device = "cpu"'


def attend(query: Any, key: Any, value: Any, visible_LS: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Attention in float64: (B, H, L, C), (B, K, S, C) twice -> (B, H, L, C)."""
    query, key, value = exact(query), exact(key), exact(value)
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat(groups, 1) for x in (key, value))
    scores = query @ key.swapaxes(2, 3) * query.shape[-1] ** -0.5
    scores = np.where(visible_LS, scores, -np.inf)
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True) @ value


def causal(shapes: Shapes, dtype: mx.Dtype) -> Iterator[Case]:
    """Causal attention at every head width, of grouped heads."""
    for channels, length in _sizes(shapes):
        operands = _operands(shapes, dtype, length, channels)
        out = fused(*operands, mask="causal")
        yield (
            f"head_dim {channels}, {length} tokens",
            gap(out, attend(*operands, _triangle(length))),
        )


def causality(shapes: Shapes, dtype: mx.Dtype) -> Iterator[Case]:
    """Other tokens after a position leave the outputs up to it as they were, bit for bit."""
    for channels, length in _sizes(shapes):
        operands = _operands(shapes, dtype, length, channels)
        for cut in {1, length // 2, length - 1} - {0, length}:
            sign = np.where(np.arange(length) < cut, 1.0, -7.0).reshape(1, 1, length, 1)
            later = [x * mx.array(sign.astype(np.float32)).astype(dtype) for x in operands]
            before, after = (fused(*x, mask="causal") for x in (operands, later))
            where = f"head_dim {channels}, {length} tokens, changed from {cut}"
            yield where, gap(after[:, :, :cut], exact(before)[:, :, :cut])


def masked(shapes: Shapes, dtype: mx.Dtype) -> Iterator[Case]:
    """A boolean mask: causal, padded on the left, with a window."""
    for channels in _head_dims(shapes):
        operands = _operands(shapes, dtype, 70, channels)
        visible_LS = _triangle(70) & ~_triangle(70, -16)
        visible_LS[:, :9] = False
        np.fill_diagonal(visible_LS, True)
        out = fused(*operands, mask=as_mask(visible_LS))
        yield f"head_dim {channels}", gap(out, attend(*operands, visible_LS))


def decode(shapes: Shapes, dtype: mx.Dtype) -> Iterator[Case]:
    """One query over a cache that is longer than its filled part; beyond it lie huge numbers."""
    for channels in _head_dims(shapes):
        for length in DECODED:
            query = draw(1, shapes.heads, 1, channels, dtype=dtype)
            cache = [
                draw(1, shapes.kv_heads, length, channels, dtype=dtype, seed=s) for s in (1, 2)
            ]
            beyond = mx.full((1, shapes.kv_heads, 40, channels), 1e4, dtype)
            key, value = (mx.concatenate([x, beyond], 2)[:, :, :length] for x in cache)
            wanted = attend(query, *cache, np.ones((1, length), bool))
            yield f"head_dim {channels}, {length} keys", gap(fused(query, key, value), wanted)


def gradients(shapes: Shapes, dtype: mx.Dtype) -> Iterator[Case]:
    """Gradients in a causal layer, against differences of the float64 formula."""
    for channels in _head_dims(shapes):
        operands = _operands(shapes, dtype, 17, channels)
        upstream = draw(*operands[0].shape, dtype=dtype, seed=9)
        _, found = mx.vjp(lambda q, k, v: fused(q, k, v, mask="causal"), operands, [upstream])
        for number, name in enumerate("qkv"):
            yield f"head_dim {channels}, d{name}", _slope(operands, found, upstream, number)


def _slope(operands: list[mx.array], found: Any, upstream: mx.array, number: int) -> float:
    """The derivative in one random direction: by the gradient, and by a central difference."""
    inputs, step = [exact(x) for x in operands], 1e-5
    way = np.random.default_rng(number).standard_normal(inputs[number].shape)
    moved = []
    for sign in (1, -1):
        shifted = list(inputs)
        shifted[number] = inputs[number] + sign * step * way
        moved.append((attend(*shifted, _triangle(17)) * exact(upstream)).sum())
    terms = exact(found[number]) * way
    return abs(terms.sum() - (moved[0] - moved[1]) / (2 * step)) / np.sqrt((terms**2).sum())


def as_mask(visible: Any) -> mx.array:
    """A numpy mask on the device."""
    return mx.array(visible)


def fused(query: mx.array, key: mx.array, value: mx.array, mask: Any = None) -> mx.array:
    """MLX's own attention, scaled as usual."""
    scale = query.shape[-1] ** -0.5
    return mx.fast.scaled_dot_product_attention(query, key, value, scale=scale, mask=mask)


def _operands(shapes: Shapes, dtype: mx.Dtype, length: int, channels: int) -> list[mx.array]:
    counts = (shapes.heads, shapes.kv_heads, shapes.kv_heads)
    return [draw(1, n, length, channels, dtype=dtype, seed=s) for s, n in enumerate(counts)]


def _head_dims(shapes: Shapes) -> list[int]:
    return sorted({*HEAD_DIMS, shapes.head_dim})


def _sizes(shapes: Shapes) -> Iterator[tuple[int, int]]:
    for channels in _head_dims(shapes):
        for length in LENGTHS:
            yield channels, length
    yield shapes.head_dim, shapes.length


def _triangle(length: int, offset: int = 0) -> NDArray[np.bool_]:
    return np.tril(np.ones((length, length), bool), offset)


FAMILIES = (
    Family(name="attention.causal", measure=causal, remedy=AROUND, avoid="attention"),
    Family(
        name="attention.causality",
        measure=causality,
        tolerance=0.0,
        remedy=AROUND,
        avoid="attention",
    ),
    Family(name="attention.masked", measure=masked, remedy=AROUND, avoid="attention"),
    Family(name="attention.decode", measure=decode, remedy=AROUND, avoid="attention"),
    Family(name="attention.gradients", measure=gradients, remedy=AROUND, avoid="attention"),
)
