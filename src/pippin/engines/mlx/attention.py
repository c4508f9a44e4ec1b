"""Exact attention over samples packed into one row: every sample attends to itself alone.

mlx-lm's models ask their cache for positions and a mask, and hand the mask to one function: a
`Packing` in the place of the cache answers both, and the function is replaced while it is in use.

Shape letters: H heads, K kv heads, T tokens, L tokens of one sample, C head channels.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from numpy.typing import NDArray

from pippin.engines.mlx import elementwise
from pippin.engines.mlx import slots as in_slots
from pippin.engines.mlx.gated import swiglu
from pippin.engines.mlx.slots import Slots

ATTEND = "scaled_dot_product_attention"
BLOCK = 64  # tokens that attend in one call, if more are not one sample's: it spares calls
HIDDEN = -1e30


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Stands where a layer expects its cache.

    `edges` are where segments begin, and the end; `positions_T` restart with every sample, `offset`
    are the same for rotary embeddings. A segment that begins at position p > 0 goes on from the
    last that began at 0, which has p tokens. With `dense` the mask is an array (T, T), for models
    that compute attention themselves. With `slots` samples of like length are computed together;
    they are whole then.
    """

    edges: tuple[int, ...]
    positions_T: NDArray[np.int32]
    offset: mx.array
    dense: bool = False
    slots: Slots | None = None

    def make_mask(self, *_: Any, window_size: int | None = None, **__: Any) -> Any:
        """What mlx-lm asks of a cache before it runs the layers."""
        if self.dense:
            return mx.array(self._seen((0, self.edges[-1]), window_size))
        if self.slots is not None:
            return Window(window_size, self.slots)
        bounds = self._blocks()
        seen = [mx.array(self._seen(part, window_size)) for part in bounds]
        return Blocks([stop for _, stop in bounds[:-1]], [mx.where(s, 0.0, HIDDEN) for s in seen])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Nothing is kept."""
        return keys, values

    def _blocks(self) -> list[tuple[int, int]]:
        """Runs of samples, each with all that goes on from it: one, or up to `BLOCK` tokens."""
        begins = [edge for edge in self.edges[:-1] if self.positions_T[edge] == 0]
        starts, stop = [], 0
        for begin, end in pairwise([*begins, self.edges[-1]]):
            if not starts or end - starts[-1] > BLOCK:
                starts.append(begin)
            stop = end
        return list(pairwise([*starts, stop]))

    def _seen(self, part: tuple[int, int], window: int | None) -> Any:
        """Of some tokens: true where a query (rows) sees a key, no further back than a window."""
        tokens = np.arange(*part)
        own = np.array(self.edges)[np.searchsorted(self.edges, tokens, "right") - 1]
        before = self.positions_T[own]  # tokens of the beginning
        roots = np.flatnonzero(self.positions_T == 0)
        root = roots[np.searchsorted(roots, tokens, "right") - 1]
        begun = (tokens >= root[:, None]) & (tokens < (root + before)[:, None])
        seen = ((tokens >= own[:, None]) | begun) & (tokens <= tokens[:, None])
        distance = np.subtract.outer(self.positions_T[tokens], self.positions_T[tokens])
        return seen & (distance < (window or len(self.positions_T)))


@dataclass(frozen=True, slots=True)
class Window:
    """The mask of slots, in words. `size` limits how far back a token sees."""

    size: int | None
    slots: Slots


@dataclass(frozen=True, slots=True)
class Blocks:
    """Masks to add, one for each of the parts that a row is cut into at `edges`."""

    edges: list[int]
    masks: list[mx.array]


@contextlib.contextmanager
def packed_attention(network: nn.Module) -> Generator[None]:
    """Inside, the network's attention understands our masks; any other goes its old way.

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
    mask, rule = kw.get("mask"), {"scale": kw.get("scale"), "sinks": kw.get("sinks")}
    if isinstance(mask, Window):
        call = functools.partial(_samples, window=mask.size, **rule)
        return in_slots.attend(query, key, value, mask.slots, call)
    if isinstance(mask, Blocks):
        if len(mask.masks) == 1:
            return _block(query, key, value, mask.masks[0], **rule)
        parts: Any = [mx.split(x, mask.edges, axis=2) for x in (query, key, value)]
        outs = [_block(*qkvm, **rule) for qkvm in zip(*parts, mask.masks, strict=True)]
        return mx.concatenate(outs, axis=2)
    return own(query, key, value, *args, **kw)


def _samples(
    query: mx.array, key: mx.array, value: mx.array, *, window: int | None, **rule: Any
) -> mx.array:
    """Whole samples, each in a row of its own. `rule` are scale and sinks."""
    length = query.shape[2]
    mask = visible(length, window) if window is not None and length > window else "causal"
    return mx.fast.scaled_dot_product_attention(query, key, value, mask=mask, **rule)


def _block(
    query: mx.array, key: mx.array, value: mx.array, mask: mx.array, **rule: Any
) -> mx.array:
    if elementwise.on_cpu(query) and rule["sinks"] is None:
        return elementwise.attend(query, key, value, mask, rule["scale"])
    mask = mask.astype(query.dtype)
    return mx.fast.scaled_dot_product_attention(query, key, value, mask=mask, **rule)


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
