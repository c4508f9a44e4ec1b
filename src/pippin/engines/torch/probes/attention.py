"""Probes of fused attention: masks, head widths, grouped heads, decoding, gradients.

Shape letters: B rows, H heads, K kv heads, L queries, S keys, C head channels.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as fused

from pippin.check import Case
from pippin.check.families import CPU, Family
from pippin.engines.torch.attention import Rule, spelled_out
from pippin.engines.torch.probes.bench import Bench, exact, gap

HEAD_DIMS = (64, 80, 96, 100, 128, 256)
LENGTHS = (1, 33, 130)
# Around the lengths at which decoding kernels change their algorithm.
DECODED = (1, 2, 31, 257, 1023, 1024, 1025, 2049, 4097)
AROUND = 'plain products instead: model.attention = "math"'


def attend(query: Tensor, key: Tensor, value: Tensor, visible_LS: Tensor) -> Tensor:
    """Attention spelled out in float64: (B, H, L, C), (B, K, S, C) twice -> (B, H, L, C)."""
    query, key, value = exact(query), exact(key), exact(value)
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
    return scores.masked_fill(~visible_LS, -torch.inf).softmax(-1) @ value


def causal(bench: Bench, dtype: torch.dtype) -> Iterator[Case]:
    """Causal attention at every head width."""
    for channels, length in _sizes(bench):
        query, key, value = _operands(bench, dtype, length, channels, heads=(2, 2))
        with torch.no_grad():
            out = fused(query, key, value, is_causal=True)
        yield (
            f"head_dim {channels}, {length} tokens",
            gap(out, attend(query, key, value, _triangle(length))),
        )


def causality(bench: Bench, dtype: torch.dtype) -> Iterator[Case]:
    """Other tokens after a position leave the outputs up to it as they were, bit for bit."""
    for channels, length in _sizes(bench):
        query, key, value = _operands(bench, dtype, length, channels, heads=(2, 2))
        for cut in {1, length // 2, length - 1} - {0, length}:
            later = [x.clone() for x in (query, key, value)]
            for x in later:
                x[:, :, cut:] *= -7
            with torch.no_grad():
                before = fused(query, key, value, is_causal=True)
                after = fused(later[0], later[1], later[2], is_causal=True)
            where = f"head_dim {channels}, {length} tokens, changed from {cut}"
            yield where, gap(after[:, :, :cut], before[:, :, :cut])


def padded(bench: Bench, dtype: torch.dtype) -> Iterator[Case]:
    """A causal mask with padding on the left, at the positions that are no padding."""
    for channels, length in _sizes(bench):
        query, key, value = _operands(bench, dtype, length, channels, heads=(2, 2))
        pad = length // 3
        visible_LS = _triangle(length)
        visible_LS[:, :pad] = False
        visible_LS.fill_diagonal_(True)
        with torch.no_grad():
            out = fused(query, key, value, attn_mask=bench.put(visible_LS))
        wanted = attend(query, key, value, visible_LS)
        yield f"head_dim {channels}, {length} tokens", gap(out[:, :, pad:], wanted[:, :, pad:])


def grouped(bench: Bench, dtype: torch.dtype) -> Iterator[Case]:
    """Several query heads to a kv head."""
    for channels, length in _sizes(bench):
        query, key, value = _operands(bench, dtype, length, channels, heads=_heads(bench))
        with torch.no_grad():
            out = fused(query, key, value, is_causal=True, enable_gqa=True)
        yield (
            f"head_dim {channels}, {length} tokens",
            gap(out, attend(query, key, value, _triangle(length))),
        )


def window(bench: Bench, dtype: torch.dtype) -> Iterator[Case]:
    """A sliding window as an additive mask, as layers with one give it."""
    for channels in _head_dims(bench):
        query, key, value = _operands(bench, dtype, 70, channels, heads=(2, 2))
        visible_LS = _triangle(70).triu(-15)
        mask_LS = torch.zeros(70, 70).masked_fill(~visible_LS, torch.finfo(dtype).min)
        with torch.no_grad():
            out = fused(query, key, value, attn_mask=bench.put(mask_LS.to(dtype)))
        yield f"head_dim {channels}", gap(out, attend(query, key, value, visible_LS))


def decode(bench: Bench, dtype: torch.dtype) -> Iterator[Case]:
    """One query over a cache that is longer than its filled part; beyond it lie huge numbers."""
    heads, kv_heads = _heads(bench)
    for channels in _head_dims(bench):
        for length in DECODED:
            query = bench.draw(1, heads, 1, channels, dtype=dtype)
            cache = [
                bench.draw(1, kv_heads, length + 40, channels, dtype=dtype, seed=s) for s in (1, 2)
            ]
            for x in cache:
                x[:, :, length:] = 1e4
            key, value = (x[:, :, :length] for x in cache)
            with torch.no_grad():
                out = fused(query, key, value, enable_gqa=True)
            wanted = attend(query, key, value, torch.ones(1, length, dtype=torch.bool))
            yield f"head_dim {channels}, {length} keys", gap(out, wanted)


def masked_rows(bench: Bench, dtype: torch.dtype) -> Iterator[Case]:
    """A query that sees no key: finite, and the others as they should be."""
    for channels in _head_dims(bench):
        query, key, value = _operands(bench, dtype, 20, channels, heads=(2, 2))
        visible_LS = _triangle(20)
        visible_LS[:3] = False
        with torch.no_grad():
            out = fused(query, key, value, attn_mask=bench.put(visible_LS))
        blind = out[:, :, :3].isfinite().all().item()
        yield f"head_dim {channels}, rows without a key", 0.0 if blind else float("nan")
        wanted = attend(query, key, value, _triangle(20))
        yield f"head_dim {channels}, other rows", gap(out[:, :, 3:], wanted[:, :, 3:])


def gradients(bench: Bench, dtype: torch.dtype) -> Iterator[Case]:
    """Gradients of query, key and value in a causal layer of grouped heads."""
    for channels in _head_dims(bench):
        inputs = _operands(bench, dtype, 65, channels, heads=_heads(bench))
        upstream = bench.draw(*inputs[0].shape, dtype=dtype, seed=9)
        query, key, value = leaves = [x.requires_grad_() for x in inputs]
        out = fused(query, key, value, is_causal=True, enable_gqa=True)
        found = torch.autograd.grad(out, leaves, upstream)
        for name, ours, wanted in zip("qkv", found, _wanted_grads(inputs, upstream), strict=True):
            yield f"head_dim {channels}, d{name}", gap(ours, wanted)


def plain(bench: Bench, dtype: torch.dtype) -> Iterator[Case]:
    """Attention in plain products, the way round wrong kernels: outputs and gradients."""
    for channels in _head_dims(bench):
        inputs = _operands(bench, dtype, 65, channels, heads=_heads(bench))
        upstream = bench.draw(*inputs[0].shape, dtype=dtype, seed=9)
        query, key, value = leaves = [x.requires_grad_() for x in inputs]
        rule = Rule(scale=channels**-0.5, dropout=0.0, window=None, softcap=None, sinks_H=None)
        out = spelled_out(query, key, value, rule)
        yield f"head_dim {channels}", gap(out, attend(query, key, value, _triangle(65)))
        found = torch.autograd.grad(out, leaves, upstream)
        for name, ours, wanted in zip("qkv", found, _wanted_grads(inputs, upstream), strict=True):
            yield f"head_dim {channels}, d{name}", gap(ours, wanted)


def _wanted_grads(inputs: list[Tensor], upstream: Tensor) -> tuple[Tensor, ...]:
    leaves = [exact(x).requires_grad_() for x in inputs]
    query, key, value = leaves
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
    hidden_LS = ~_triangle(query.shape[2])
    out = scores.masked_fill(hidden_LS, -torch.inf).softmax(-1) @ value
    return torch.autograd.grad(out, leaves, exact(upstream))


def _operands(
    bench: Bench, dtype: torch.dtype, length: int, channels: int, heads: tuple[int, int]
) -> list[Tensor]:
    counts = (heads[0], heads[1], heads[1])
    return [
        bench.draw(1, count, length, channels, dtype=dtype, seed=seed)
        for seed, count in enumerate(counts)
    ]


def _heads(bench: Bench) -> tuple[int, int]:
    return bench.shapes.heads, bench.shapes.kv_heads


def _head_dims(bench: Bench) -> list[int]:
    return sorted({*HEAD_DIMS, bench.shapes.head_dim})


def _sizes(bench: Bench) -> Iterator[tuple[int, int]]:
    """Every head width at every length, and the planned width at the planned length."""
    for channels in _head_dims(bench):
        for length in LENGTHS:
            yield channels, length
    yield bench.shapes.head_dim, bench.shapes.length


def _triangle(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def _family(name: str, measure: Any, **rest: Any) -> Family:
    return Family(
        name=f"attention.{name}", measure=measure, remedy=AROUND, avoid="attention", **rest
    )


FAMILIES = (
    _family("causal", causal),
    _family("causality", causality, tolerance=0.0),
    _family("padded", padded),
    _family("grouped heads", grouped),
    _family("window", window),
    _family("decode", decode),
    _family("masked rows", masked_rows),
    _family("gradients", gradients),
    Family(name="attention.plain products", measure=plain, remedy=CPU, avoid="device"),
)
