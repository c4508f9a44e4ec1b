"""Attention over a packed row on a GPU: samples of like length side by side, in few large calls.

Shape letters: H heads, K kv heads, T tokens of the row, S slots, R rows of either, C head channels,
L slots of one sample.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from pippin.engines.mlx.gated import fuses

TILE = 128  # MLX's fused backward wants lengths that are multiples of it,
CHANNELS = 8  # and its forward such head sizes
WIDE = 4  # channels that a thread moves: 8 bytes of a half-precision dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """Where the row's tokens stand. `groups` are (samples, L) one after the other.

    `token_S` is the token in a slot, `slot_T` the slot of a token. Slots behind a sample's end hold
    the row's last token, which belongs to nobody: nothing reads it, so its gradients are zero.
    """

    groups: tuple[tuple[int, int], ...]
    token_S: mx.array
    slot_T: mx.array


def find_slots(edges: Sequence[int]) -> Slots:
    """Slots for samples that begin at `edges`, the end included; the last sample is nobody's.

    Few shapes occur, since kernels are prepared for each: lengths and numbers of samples are
    rounded up.
    """
    starts, lengths = np.array(edges[:-1]), np.diff(edges)
    wide = np.array([TILE * _rounded(-(-int(n) // TILE)) for n in lengths])
    groups, tokens, slot_T = [], [], np.zeros(edges[-1], np.int32)
    used = 0
    for length in np.unique(wide).tolist():
        members = np.flatnonzero(wide == length)
        token_RL = np.full((_rounded(len(members)), length), edges[-1] - 1)
        for row, sample in enumerate(members):
            count = lengths[sample]
            token_RL[row, :count] = range(starts[sample], starts[sample] + count)
            first = used + row * length
            slot_T[starts[sample] : starts[sample] + count] = range(first, first + count)
        groups.append(token_RL.shape)
        tokens.append(token_RL.ravel())
        used += token_RL.size
    token_S = np.concatenate(tokens).astype(np.int32)
    return Slots(groups=tuple(groups), token_S=mx.array(token_S), slot_T=mx.array(slot_T))


def attend(
    query: mx.array, key: mx.array, value: mx.array, slots: Slots, call: Callable[..., mx.array]
) -> mx.array:
    """(1, H, T, C), (1, K, T, C) -> (1, H, T, C). `call` is attention of whole samples."""
    channels = value.shape[-1]
    padded = channels + -channels % CHANNELS
    there, back = slots.token_S, slots.slot_T
    sizes = [samples * length for samples, length in slots.groups]
    bounds = np.cumsum(sizes)[:-1].tolist()
    rows = [x.squeeze(0).swapaxes(0, 1) for x in (query, key, value)]
    parts = [mx.split(_move(x_THC, there, back, padded), bounds) for x_THC in rows]
    outs = []
    for (samples, length), *qkv in zip(slots.groups, *parts, strict=True):
        q, k, v = (x.reshape(samples, length, *x.shape[1:]).swapaxes(1, 2) for x in qkv)
        outs.append(call(q, k, v).swapaxes(1, 2).flatten(0, 1))
    out_THC = _move(mx.concatenate(outs), back, there, channels)
    return out_THC.swapaxes(0, 1)[None]


def _move(x_RHC: mx.array, there: mx.array, back: mx.array, channels: int) -> mx.array:
    """x[there], with `channels` a head: cut off, or filled up with zeros.

    Gradients are moved by `back`, which is faster than adding them up.
    """

    @mx.custom_function
    def move(x: mx.array) -> mx.array:
        return _taken(x, there, channels)

    @move.vjp
    def backward(primals: Any, cotangent: mx.array, output: Any) -> mx.array:
        del output
        return _taken(cotangent, back, primals.shape[-1])

    moved: Any = move(x_RHC)
    return moved


def _taken(x_RHC: mx.array, index: mx.array, channels: int) -> mx.array:
    _, heads, own = x_RHC.shape
    if fuses(x_RHC) and own % WIDE == 0 and channels % WIDE == 0:
        sizes = {"HEADS": heads, "OWN": own // WIDE, "WANTED": channels // WIDE}
        return _kernel()(
            inputs=[x_RHC, index],
            template=list(sizes.items()),
            grid=(len(index) * heads * channels // WIDE, 1, 1),
            threadgroup=(256, 1, 1),
            output_shapes=[(len(index), heads, channels)],
            output_dtypes=[x_RHC.dtype],
        )[0]
    if channels > own:
        x_RHC = mx.pad(x_RHC, [(0, 0), (0, 0), (0, channels - own)])
    return mx.take(x_RHC[..., :channels], index, axis=0)


@functools.cache
def _kernel() -> Any:
    """Several times as fast as MLX's gather."""
    source = """
    size_t place = cooperative_groups::this_grid().thread_rank();
    if (place >= static_cast<size_t>(index_shape[0]) * HEADS * WANTED) return;
    int channel = place % WANTED;
    size_t row = place / WANTED;
    size_t from = static_cast<size_t>(index[row / HEADS]) * HEADS + row % HEADS;
    uint2 value = make_uint2(0u, 0u);
    if (channel < OWN) value = reinterpret_cast<const uint2*>(x)[from * OWN + channel];
    reinterpret_cast<uint2*>(out)[place] = value;
    """
    make: Any = mx.fast.cuda_kernel
    names = {"input_names": ["x", "index"], "output_names": ["out"]}
    return make(name="move_rows", source=source, **names)


def _rounded(count: int) -> int:
    """1, 2, 3, 4, 6, 8, 12, 16, 24 and so on: the next that is no smaller."""
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power
