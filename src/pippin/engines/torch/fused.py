"""Norms and gated MLPs with a backward of their own: the same numbers, less kept in memory.

Autograd keeps a float32 copy of every norm's input and both factors of every gated product; these
keep what is there anyway and compute the rest again. A module is only replaced where it is frozen
and its own forward gives the same numbers.

Shape letters: N tokens, D hidden, F feed-forward.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pippin.engines.torch.attention import prepare
from pippin.engines.torch.body import close


def fuse(modules: Iterable[nn.Module]) -> list[str]:
    """Replace what can be; the classes of the modules that were."""
    replaced = set()
    for module in modules:
        forward = _norm(module) or _gated(module)
        if forward is not None and _same(module, forward):
            module.forward = forward
            replaced.add(type(module).__name__)
    return sorted(replaced)


def _norm(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Llama's RMSNorm: normalise in float32, round, then scale."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not type(module).__name__.endswith("RMSNorm") or weight is None or eps is None:
        return None
    if weight.requires_grad or weight.dim() != 1 or weight.dtype == torch.float64:
        return None
    if prepare(weight.device):
        from pippin.engines.torch.layer_ops import PlainNorm

        return lambda x: PlainNorm.apply(x, weight, eps)
    return lambda x: _Norm.apply(x, weight, eps)


def _gated(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """down(silu(gate(x)) * up(x)), whatever its linears are."""
    parts: list[Any] = [getattr(module, f"{name}_proj", None) for name in ("gate", "up", "down")]
    activation = type(getattr(module, "act_fn", None)).__name__
    if not all(isinstance(getattr(part, "weight", None), Tensor) for part in parts):
        return None
    if activation not in ("SiLU", "SiLUActivation") or len(_arguments(module)) != 1:
        return None
    gate, up, down = parts
    return lambda x: down(_Gate.apply(gate(x), up(x)))


def _arguments(module: nn.Module) -> list[str]:
    return list(inspect.signature(module.forward).parameters)


@torch.no_grad()
def _same(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> bool:
    first: Any = getattr(module, "gate_proj", module)
    width = first.weight.shape[-1]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, width, generator=generator).to(first.weight)
    wanted = module(x)
    return close(forward(x), wanted, x.dtype)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.float32)
        rate = wide.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, rate, weight)
        return (wide * rate).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, rate, weight = ctx.saved_tensors
        normed = x.to(torch.float32) * rate
        grad = (grads[0] * weight).to(torch.float32)
        inner = (grad * normed).mean(-1, keepdim=True)
        return grad.addcmul_(normed, inner, value=-1).mul_(rate).to(x.dtype), None, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        gate, up = ctx.saved_tensors
        d_up = functional.silu(gate).mul_(grads[0])
        d_gate = torch.ops.aten.silu_backward(grads[0] * up, gate)
        return d_gate, d_up
