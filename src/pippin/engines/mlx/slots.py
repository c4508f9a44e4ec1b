"""Attention over a packed row on a GPU: samples of like length side by side, in few large calls.

Shape letters: H heads, K kv heads, T tokens of the row, S slots, C head channels, D = H x C or
K x C, L slots of one sample.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

TILE = 128  # MLX's fused backward wants lengths that are multiples of it,
CHANNELS = 8  # and its forward such head sizes


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
    sizes = [samples * length for samples, length in slots.groups]
    bounds = np.cumsum(sizes)[:-1].tolist()
    parts = [mx.split(_to_slots(x, slots), bounds) for x in (query, key, value)]
    outs = []
    for (samples, length), *qkv in zip(slots.groups, *parts, strict=True):
        q, k, v = (x.reshape(samples, length, *x.shape[1:]).swapaxes(1, 2) for x in qkv)
        outs.append(call(q, k, v).swapaxes(1, 2).reshape(samples * length, -1))
    out_TD = _move(mx.concatenate(outs), slots.slot_T, slots.token_S)
    out_THC = out_TD.reshape(len(out_TD), query.shape[1], -1)
    return out_THC[..., :channels].swapaxes(0, 1)[None]


def _to_slots(x: mx.array, slots: Slots) -> mx.array:
    """(1, H, T, C) -> (S, H, C), with channels of zeros behind where C is an odd size."""
    missing = -x.shape[-1] % CHANNELS
    x_THC = x[0].swapaxes(0, 1)
    if missing:
        x_THC = mx.pad(x_THC, [(0, 0), (0, 0), (0, missing)])
    rows = _move(x_THC.reshape(len(x_THC), -1), slots.token_S, slots.slot_T)
    return rows.reshape(len(rows), *x_THC.shape[1:])


def _move(rows: mx.array, there: mx.array, back: mx.array) -> mx.array:
    """rows[there]. Gradients are moved by `back`, which is faster than adding them up."""

    @mx.custom_function
    def move(x: mx.array) -> mx.array:
        return mx.take(x, there, axis=0)

    @move.vjp
    def backward(primals: Any, cotangent: mx.array, output: Any) -> mx.array:
        del primals, output
        return mx.take(cotangent, back, axis=0)

    moved: Any = move(rows)
    return moved


def _rounded(count: int) -> int:
    """1, 2, 3, 4, 6, 8, 12, 16, 24 and so on: the next that is no smaller."""
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power
