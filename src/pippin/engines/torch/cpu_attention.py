"""Causal attention over packed samples on a CPU: one kernel a sample, forward and backward.

Shape letters: B 1, H heads, K kv heads, T tokens, L tokens of one sample, C head channels.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Bounds: TypeAlias = Sequence[tuple[int, int]]

# Where a sample is shorter than this, the kernel is 1.1 to 2.5 times faster on float32 than on
# bfloat16, conversions included (benchmarks/bench_attention.py).
FLOAT32_BELOW = 400


def attend_samples(query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, scale: float):
    """(1, H, T, C), (1, K, T, C) -> (1, T, H, C). Every sample of `bounds` attends to itself."""
    return _Samples.apply(query, key, value, bounds, scale)


class _Samples(torch.autograd.Function):
    """Autograd over slices would fill and add one full-width tensor a sample; this writes once."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        bounds, scale = rest
        out = query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])
        sums = []
        for start, stop in bounds:
            parts = _parts((query, key, value), start, stop)
            part, lse = _kernel()(*parts, 0.0, True, scale=scale)
            out[:, start:stop] = part.transpose(1, 2)
            sums.append(lse)
        ctx.save_for_backward(query, key, value, out, *sums)
        ctx.bounds, ctx.scale = bounds, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        query, key, value, out, *sums = ctx.saved_tensors
        inputs = (query, key, value)
        filled = tuple(torch.empty_like(x) for x in inputs)
        for (start, stop), lse in zip(ctx.bounds, sums, strict=True):
            rows = (grads[0].transpose(1, 2), *inputs, out.transpose(1, 2))
            parts = _kernel_backward()(*_parts(rows, start, stop), lse, 0.0, True, scale=ctx.scale)
            for whole, part in zip(filled, parts, strict=True):
                whole[:, :, start:stop] = part
        return (*filled, None, None)


def _parts(tensors: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
    parts = [x[:, :, start:stop] for x in tensors]
    if stop - start < FLOAT32_BELOW and parts[0].dtype == torch.bfloat16:
        parts = [x.float() for x in parts]
    return parts


def _kernel() -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def _kernel_backward() -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
