"""Exact attention over samples packed into one row: every sample attends to itself alone.

mlx-lm's models ask their cache for positions and a mask, and hand the mask to one function: a
`Packing` in the place of the cache answers both, and the function is replaced while it is in use.

Shape letters: H heads, K kv heads, T tokens, L tokens of one sample, C head channels.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn

from pippin.engines.mlx import elementwise
from pippin.engines.mlx import slots as in_slots
from pippin.engines.mlx.gated import swiglu
from pippin.engines.mlx.slots import Slots

ATTEND = "scaled_dot_product_attention"


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Stands where a layer expects its cache. `edges` are where segments begin, and the end.

    `offset` are the positions of all tokens (T,), which restart with every sample. `roots` is for
    every segment the number of the one that it goes on from, None where a sample begins. With
    `dense` the mask is an array (T, T), for models that compute attention themselves. With `slots`
    samples of like length are computed together. Both take whole samples alone.
    """

    edges: tuple[int, ...]
    roots: tuple[int | None, ...]
    offset: mx.array
    dense: bool = False
    slots: Slots | None = None

    def make_mask(self, *_: Any, window_size: int | None = None, **__: Any) -> Any:
        """What mlx-lm asks of a cache before it runs the layers."""
        if self.dense:
            return self._block_mask(window_size)
        return Window(self.edges, self.roots, window_size, self.slots)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Nothing is kept."""
        return keys, values

    def _block_mask(self, window: int | None) -> mx.array:
        starts_T = mx.arange(len(self.offset)) - self.offset
        return (starts_T[:, None] == starts_T[None]) & visible(len(self.offset), window)


@dataclass(frozen=True, slots=True)
class Window:
    """The mask of a packed row, in words. `size` limits how far back a token sees."""

    edges: tuple[int, ...]
    roots: tuple[int | None, ...]
    size: int | None
    slots: Slots | None


@contextlib.contextmanager
def packed_attention(network: nn.Module) -> Generator[None]:
    """Inside, the network's attention understands a `Window`; any other mask goes its old way.

    Its SwiGLU is the one that keeps less for the backward.
    """
    files = {sys.modules[type(module).__module__] for module in network.modules()}
    names = (ATTEND, swiglu.__name__)
    found = [(file, name) for file in files for name in names if hasattr(file, name)]
    before = [(*place, getattr(*place)) for place in found]
    for file, name, own in before:
        setattr(file, name, functools.partial(_attend, own) if name == ATTEND else swiglu)
    try:
        yield
    finally:
        for file, name, own in before:
            setattr(file, name, own)


def accept_positions(network: nn.Module) -> None:
    """Let the rotary embeddings take a position a token where they take an offset a row."""
    for module in network.modules():
        kind = type(module)
        if "rope" in kind.__name__.lower():
            module.__class__ = _positioned(kind)


def _attend(
    own: Callable[..., mx.array],
    query: mx.array,
    key: mx.array,
    value: mx.array,
    *args: Any,
    **kw: Any,
) -> mx.array:
    """mlx-lm's signature: (1, H, T, C) and (1, K, T, C) -> (1, H, T, C)."""
    mask = kw.get("mask")
    if not isinstance(mask, Window):
        return own(query, key, value, *args, **kw)

    call = functools.partial(_sample, window=mask.size, scale=kw["scale"], sinks=kw.get("sinks"))
    if mask.slots is not None:
        return in_slots.attend(query, key, value, mask.slots, call)
    inner = list(mask.edges[1:-1])
    queries, *before = (
        list(mx.split(x, inner, axis=2)) if inner else [x] for x in (query, key, value)
    )
    keys, values = (_whole(parts, mask.roots) for parts in before)
    outs = [call(*qkv) for qkv in zip(queries, keys, values, strict=True)]
    return mx.concatenate(outs, axis=2) if len(outs) > 1 else outs[0]


def _whole(parts: Sequence[mx.array], roots: Sequence[int | None]) -> list[mx.array]:
    """Keys or values of every segment, those before it in its sample included."""
    return [
        own if root is None else mx.concatenate([parts[root], own], axis=2)
        for own, root in zip(parts, roots, strict=True)
    ]


def _sample(
    query: mx.array, key: mx.array, value: mx.array, *, window: int | None, **rule: Any
) -> mx.array:
    """Samples, each in a row of its own; the queries are its last. `rule` are scale and sinks."""
    if elementwise.on_cpu(query) and rule["sinks"] is None:
        return elementwise.attend(query, key, value, rule["scale"], window)
    mask = _mask(query.shape[2], key.shape[2], window)
    return mx.fast.scaled_dot_product_attention(query, key, value, mask=mask, **rule)


def _mask(queries: int, length: int, window: int | None) -> Any:
    if window is None or length <= window:
        return "causal"
    return visible(length, window)[length - queries :]


def visible(length: int, window: int | None) -> mx.array:
    """(L, L): true where a query sees a key, itself and the `window - 1` tokens before it."""
    index = mx.arange(length)
    distance = index[:, None] - index[None]
    return (distance >= 0) & (distance < (window or length))


@functools.cache
def _positioned(kind: Any) -> type:
    if hasattr(kind, "takes_positions"):
        return kind

    class Positioned(kind):
        takes_positions = True

        def __call__(self, x: mx.array, offset: Any = 0, *args: Any, **kwargs: Any) -> mx.array:
            packed = isinstance(offset, mx.array) and offset.ndim == 1 and len(x) == 1
            if not packed or offset.size != x.shape[-2] or offset.size == 1:
                return super().__call__(x, offset, *args, **kwargs)
            # An offset a row is what there is: each token becomes a row of its own.
            rows = super().__call__(x.swapaxes(0, -2), offset, *args, **kwargs)
            return rows.swapaxes(0, -2)

    Positioned.__name__ = Positioned.__qualname__ = kind.__name__
    Positioned.__module__ = kind.__module__
    return Positioned
