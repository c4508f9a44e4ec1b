"""Causal attention over packed samples on a CPU: one kernel a sample, forward and backward.

Shape letters: B 1, H heads, K kv heads, T tokens, L tokens of one sample, P keys that they see,
C head channels.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Where a sample is shorter than this, the kernel is 1.1 to 2.5 times faster on float32 than on
# bfloat16, conversions included (benchmarks/bench_attention.py).
FLOAT32_BELOW = 400


class Span(NamedTuple):
    """Where a sample lies, or its rest: it goes on from the tokens `begun` to `parted`, if any."""

    start: int
    stop: int
    begun: int = 0
    parted: int = 0

    @property
    def shared(self) -> int:
        """Tokens that it goes on from."""
        return self.parted - self.begun

    def own(self, x: Tensor) -> Tensor:
        """Its tokens of (B, H, T, C), a view."""
        return x[:, :, self.start : self.stop]

    def seen(self, x: Tensor) -> Tensor:
        """The tokens that its last one attends to."""
        begun = x[:, :, self.begun : self.parted]
        return torch.cat([begun, self.own(x)], 2) if self.shared else self.own(x)


def attend_samples(query: Tensor, key: Tensor, value: Tensor, spans: Sequence[Span], scale: float):
    """(1, H, T, C), (1, K, T, C) -> (1, T, H, C). Every sample attends to itself alone."""
    return _Samples.apply(query, key, value, spans, scale)


class _Samples(torch.autograd.Function):
    """Autograd over slices would fill and add one full-width tensor a sample; this writes once."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        spans, scale = rest
        out = query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])
        sums = []
        for span in spans:
            parts = _exact(span.own(query), span.seen(key), span.seen(value))
            mask_LP = _mask(parts[0], span)
            kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
            part, lse = kernel(*parts, 0.0, mask_LP is None, attn_mask=mask_LP, scale=scale)
            out[:, span.start : span.stop] = part.transpose(1, 2)
            sums.append(lse)
        ctx.save_for_backward(query, key, value, out, *sums)
        ctx.spans, ctx.scale = spans, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        query, key, value, out, *sums = ctx.saved_tensors
        filled = tuple(torch.empty_like(x) for x in (query, key, value))
        for span, lse in zip(ctx.spans, sums, strict=True):
            beside = (span.own(x.transpose(1, 2)) for x in (grads[0], out))
            parts = _exact(*beside, span.own(query), span.seen(key), span.seen(value))
            parts.insert(4, parts.pop(1))
            mask_LP = _mask(parts[0], span)
            kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
            found = kernel(*parts, lse, 0.0, mask_LP is None, attn_mask=mask_LP, scale=ctx.scale)
            _fill(filled, found, span)
        return (*filled, None, None)


def _fill(filled: Sequence[Tensor], found: Sequence[Tensor], span: Span) -> None:
    """A sample's gradients; those of a beginning, which came before, add up over its rests."""
    for whole, part in zip(filled, found, strict=True):
        own = span.stop - span.start
        span.own(whole).copy_(part[:, :, -own:])
        whole[:, :, span.begun : span.begun + part.shape[2] - own] += part[:, :, :-own]


def _exact(*parts: Tensor) -> list[Tensor]:
    short = parts[0].shape[2] < FLOAT32_BELOW and parts[0].dtype == torch.bfloat16
    return [x.float() for x in parts] if short else list(parts)


def _mask(query: Tensor, span: Span) -> Tensor | None:
    """(L, P), 0 where a query sees a key; None for plain causal attention."""
    if not span.shared:
        return None
    own = span.stop - span.start
    hidden = query.new_full((own, span.shared + own), -torch.inf)
    return hidden.triu_(span.shared + 1)
