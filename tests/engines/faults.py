"""Faults as backends had them, put between PyTorch and its kernels.

Whatever is float64 is left alone: the references of the probes are, the device's side is not.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

Change = Callable[..., Any]


class Fault(TorchDispatchMode):
    """Operators by name whose result `change(call, args, kwargs)` makes."""

    def __init__(self, names: str, change: Change) -> None:
        super().__init__()
        self.names, self.change, self.met = set(names.split()), change, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        asked = kwargs.get("dtype")
        exact = any(x.dtype == torch.float64 for x in tensors) or asked == torch.float64
        if name not in self.names or exact:
            return func(*args, **kwargs)
        self.met += 1
        return self.change(func, args, kwargs)


def tail_lost(func, args, kwargs):
    """The last tenth of every result is zero."""
    return tree_map(_without_tail, func(*args, **kwargs))


def _without_tail(out):
    if not isinstance(out, Tensor) or not out.numel():
        return out
    out = out.clone()
    flat = out.view(-1) if out.is_contiguous() else out.reshape(-1)
    flat[-max(1, flat.numel() // 10) :] = 0
    return flat.view(out.shape)


def long_inner(func, args, kwargs):
    """Products forget what lies beyond inner index 32,000, as 16-bit counters do."""
    *first, a, b = args
    return func(*first, a[..., :32000], b[..., :32000, :], **kwargs)


def scaled(func, args, kwargs):
    """Half as much again."""
    return tree_map(lambda x: x * 1.5 if isinstance(x, Tensor) else x, func(*args, **kwargs))


def leaking(func, args, kwargs):
    """Causal attention that sees three tokens ahead (pytorch#195910)."""
    query, key, value, dropout, causal = (*args, 0.0, False)[:5]
    if not causal:
        return func(*args, **kwargs)
    length = query.shape[2]
    mask = torch.ones(length, length, dtype=torch.bool).tril(3)
    mask = torch.zeros(length, length, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    return func(query, key, value, dropout, False, **{**kwargs, "attn_mask": mask})


def deaf_to_masks(func, args, kwargs):
    """A mask that is not applied."""
    return func(*args, **{**kwargs, "attn_mask": None})


def reading_on(func, args, kwargs):
    """One key more than there are: the memory behind a cache's filled part (pytorch#174861)."""
    query, key, value = args[:3]
    more = [
        x.as_strided((*x.shape[:2], x.shape[2] + 1, x.shape[3]), x.stride()) for x in (key, value)
    ]
    return func(query, *more, *args[3:], **kwargs)


def blind_nan(func, args, kwargs):
    """A row without a visible key turns to NaN (pytorch#167515)."""
    out, *rest = func(*args, **kwargs)
    out = out.clone()
    out[:, :, 0] = torch.nan
    return (out, *rest)


def heads_mixed(func, args, kwargs):
    """kv heads dealt out in turn instead of in groups."""
    query, key, value = args[:3]
    order = torch.arange(key.shape[1]).roll(1)
    return func(query, key[:, order], value[:, order], *args[3:], **kwargs)


def unsteady(func, args, kwargs):
    """Calls of the same product differ (pytorch#180776)."""
    unsteady.calls += 1
    return func(*args, **kwargs) * (1.0 if unsteady.calls == 1 else 1.01)


unsteady.calls = 0


def update_lost(func, args, kwargs):
    """An optimizer that leaves the first parameter where it was (pytorch#118115)."""
    lists = [x[1:] if isinstance(x, list | tuple) else x for x in args]
    return func(*lists, **kwargs)


def truncating(func, args, kwargs):
    """Rounding toward zero instead of to nearest."""
    dtype = kwargs.get("dtype")
    if dtype not in (torch.bfloat16, torch.float16):
        return func(*args, **kwargs)
    kept = 0xFFFF0000 if dtype == torch.bfloat16 else 0xFFFFE000
    bits = args[0].contiguous().view(torch.int32) & torch.tensor(kept).to(torch.int32)
    return func(bits.view(torch.float32), **kwargs)


def one_more(func, args, kwargs):
    """Integers off by one."""
    return tree_map(lambda x: x + 1 if isinstance(x, Tensor) else x, func(*args, **kwargs))


def clamped(func, args, kwargs):
    """A row that is not there is read as another (pytorch#144824)."""
    table, index = args[:2]
    return func(table, index.clamp(max=len(table) - 1), *args[2:], **kwargs)


@contextlib.contextmanager
def patched(target: str, value: Any) -> Iterator[None]:
    """Another function in place of PyTorch's."""
    with mock.patch(target, value):
        yield


@contextlib.contextmanager
def both(*faults: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    """Two at once, such as a fault of PyTorch's and its being asked."""
    with contextlib.ExitStack() as stack:
        for fault in faults:
            stack.enter_context(fault)
        yield


def compiled_wrongly(function, **_):
    """What a compiler returns that reorders too much."""
    return lambda *args: function(*args) * 1.001


def no_autocast(*_, **__):
    """A context that does nothing (autocast for a device it does not know)."""
    return contextlib.nullcontext()
