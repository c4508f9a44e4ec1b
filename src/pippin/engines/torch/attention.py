"""Exact attention over samples packed into one row: every sample attends to itself alone.

Shape letters: B 1, H heads, K kv heads, T tokens, L tokens of one sample, P keys that they see,
C head channels.
"""

import functools
import importlib.util
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

from pippin.engines.torch.cpu_attention import Span, attend_samples

NAME = "pippin_packed"
WIDEST = 256  # head channels our kernels take
BUCKET = 64  # tokens; on MPS samples are attended to in multiples of it


@dataclass(kw_only=True)
class Packing:
    """Where the samples of a packed row begin and end. Passed through the model to every layer.

    `math` asks for plain products. On a CUDA device either `first_T` and `last_T` int32, the begin
    and the end of every token's sample, or `offsets` int32, the bounds. `seen` collects what the
    layers asked for. Where `read_S` is there, a last layer of our own returns those tokens alone.
    Samples go on from beginnings on a CPU alone.
    """

    bounds: tuple[Span, ...]
    math: bool = False
    offsets: Tensor | None = None
    first_T: Tensor | None = None
    last_T: Tensor | None = None
    seen: set[str] | None = None
    read_S: Tensor | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return max(span.shared + span.stop - span.start for span in self.bounds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """How one layer turns scores into weights, beyond plain causal attention."""

    scale: float
    dropout: float
    window: int | None
    softcap: float | None
    sinks_H: Tensor | None

    @property
    def plain(self) -> bool:
        """Whether PyTorch's fused attention computes it."""
        return self.softcap is None and self.sinks_H is None

    def simple(self, longest: int) -> bool:
        """Whether it is plain causal attention for samples of up to `longest` tokens."""
        return self.plain and self.dropout == 0.0 and (self.window or longest) >= longest


def register() -> None:
    """Make `NAME` known to transformers. It has no mask function, so no mask is ever built."""
    AttentionInterface.register(NAME, packed_attention)


@functools.cache
def prepare(device: torch.device) -> bool:
    """Whether our kernels run on this device; registers them where they do."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    from pippin.engines.torch import triton_ops

    triton_ops.register()
    return True


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: (1, H, T, C) and (1, K, T, C) -> (1, T, H, C)."""
    assert packing is not None, f"{type(module).__name__} does not pass `packing` on"
    assert attention_mask is None, "packed attention takes no mask"
    rule = rule_of(query, kwargs)
    if packing.seen is not None:
        packing.seen.update(_asks(rule))
    fused = rule.plain and rule.dropout == 0.0 and not packing.math
    if fused and packing.first_T is not None and query.shape[-1] <= WIDEST:
        operands = (query, key, value, packing.first_T, packing.last_T)
        window = query.shape[2] if rule.window is None else rule.window
        return torch.ops.pippin.attend(*operands, rule.scale, window)[0], None
    half = query.dtype in (torch.bfloat16, torch.float16)  # CUDA's kernel knows no others
    if half and packing.offsets is not None and fused:
        return _varlen(query, key, value, packing, rule), None
    return _by_sample(query, key, value, packing, rule), None


def _asks(rule: Rule) -> list[str]:
    asked = {"window": rule.window is not None, "samples": not rule.plain or rule.dropout > 0}
    return [name for name, wanted in asked.items() if wanted]


def rule_of(query: Tensor, kwargs: dict[str, Any]) -> Rule:
    """From what transformers tells an attention function."""
    scale = kwargs.get("scaling")
    return Rule(
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        dropout=kwargs.get("dropout", 0.0),
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        sinks_H=kwargs.get("s_aux"),
    )


def _by_sample(query: Tensor, key: Tensor, value: Tensor, packing: Packing, rule: Rule) -> Tensor:
    """One attention call a sample: no work and no memory outside the diagonal blocks."""
    if query.device.type == "cpu" and rule.simple(packing.longest) and not packing.math:
        return attend_samples(query, key, value, packing.bounds, rule.scale)
    attend = _fused if rule.plain and not packing.math else spelled_out
    outs = [
        attend(*_parts(span, (query, key, value)), rule)[:, :, : span.stop - span.start]
        for span in packing.bounds
    ]
    outs = [out.transpose(1, 2) for out in outs]
    return torch.cat(outs, 1) if len(outs) > 1 else outs[0].contiguous()


def _parts(span: Span, qkv: Sequence[Tensor]) -> list[Tensor]:
    """A sample's queries, and the keys and values that they may see."""
    query, key, value = qkv
    if query.device.type == "mps":
        return [_part(x, span.start, span.stop, BUCKET) for x in qkv]
    return [span.own(query), span.seen(key), span.seen(value)]


def _part(x: Tensor, start: int, stop: int, bucket: int) -> Tensor:
    """The tokens of a sample, and as many behind it as fill its last bucket.

    Attention is causal: what stands behind a sample changes nothing in it. MPS keeps the blocks of
    every length it has met, and few lengths keep them few.
    """
    length = -(-(stop - start) // bucket) * bucket
    part = x[:, :, start : start + length]
    missing = length - part.shape[2]
    return functional.pad(part, (0, 0, 0, missing)) if missing else part


def _fused(query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
    queries, keys = query.shape[2], key.shape[2]
    mask_LP, window = None, rule.window or keys
    if window < keys or queries < keys:
        mask_LP = _visible(queries, keys, window, query.device)
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask_LP,
        dropout_p=rule.dropout,
        is_causal=mask_LP is None,
        scale=rule.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def spelled_out(query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
    """Attention in plain products: (1, H, L, C) and (1, K, P, C) -> (1, H, L, C).

    For a soft cap on scores (Gemma 2), a sink a head (gpt-oss), or a device whose fused kernels are
    wrong.
    """
    groups, (length, keys) = query.shape[1] // key.shape[1], (query.shape[2], key.shape[2])
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = (query @ key.transpose(2, 3)) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    hidden_LP = ~_visible(length, keys, rule.window or keys, query.device)
    scores = scores.masked_fill(hidden_LP, torch.finfo(scores.dtype).min)
    if rule.sinks_H is not None:
        sinks = rule.sinks_H.to(scores.dtype).view(1, -1, 1, 1).expand(-1, -1, length, 1)
        scores = torch.cat([scores, sinks], -1)
    exact = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores, -1, dtype=exact)[..., :keys].to(query.dtype)
    return functional.dropout(weights, rule.dropout) @ value


def _visible(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """(L, P): true where a query sees a key, itself and the `window - 1` tokens before it.

    The queries are those of the last keys.
    """
    index = torch.arange(keys, device=device)
    distance = index[keys - queries :, None] - index
    return (distance >= 0) & (distance < window)


def _varlen(query: Tensor, key: Tensor, value: Tensor, packing: Packing, rule: Rule) -> Tensor:
    """CUDA: every sample in one kernel. It wants head channels in multiples of 8."""
    from torch.nn.attention.varlen import varlen_attn

    assert packing.offsets is not None
    channels, groups = query.shape[-1], query.shape[1] // key.shape[1]
    extra, extras = -channels % 8, {}
    if groups > 1 and "enable_gqa" in inspect.signature(varlen_attn).parameters:
        extras["enable_gqa"] = True
    elif groups > 1:  # torch 2.11
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    q, k, v = (functional.pad(x[0].transpose(0, 1), (0, extra)) for x in (query, key, value))
    bounds = (packing.offsets, packing.offsets, packing.longest, packing.longest)
    window = -1 if rule.window is None else rule.window - 1
    out = varlen_attn(q, k, v, *bounds, scale=rule.scale, window_size=(window, 0), **extras)
    assert isinstance(out, Tensor)
    return out[None, :, :, :channels]
