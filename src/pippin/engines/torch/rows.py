"""A Batch on the device: packed rows as one long row of samples, or right-padded rows as they are.

Shape letters: B rows, T tokens, N tokens of all rows, S scored positions, D hidden.
"""

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pippin.data.batches import Batch
from pippin.engines.torch.attention import Packing, prepare
from pippin.engines.torch.cpu_attention import Span


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """What one forward pass reads: `index_S` are the positions whose next token is scored.

    They count in the flattened (B x T) positions; `targets_S` are the tokens to predict there.
    """

    tokens_BT: Tensor
    index_S: Tensor
    targets_S: Tensor
    real_N: Tensor
    extra: dict[str, Any] = field(default_factory=dict)


def packed_rows(batch: Batch, device: torch.device) -> Rows:
    """All samples of the batch in one row (1, N).

    Padding is left out on a CPU. On a GPU it stays, as samples of its own: shapes stay constant.
    """
    real_BT = batch.segments_BT > 0
    keep_BT = real_BT if device.type == "cpu" else np.ones_like(real_BT)
    return _rows(batch, device, keep_BT, packing=True)


def math_rows(batch: Batch, device: torch.device) -> Rows:
    """The same for attention in plain products."""
    rows = packed_rows(batch, device)
    rows.extra["packing"] = Packing(bounds=rows.extra["packing"].bounds, math=True)
    return rows


def masked_rows(batch: Batch, device: torch.device) -> Rows:
    """The same for transformers' own attention, which builds a mask where positions restart."""
    rows = packed_rows(batch, device)
    return Rows(
        tokens_BT=rows.tokens_BT,
        index_S=rows.index_S,
        targets_S=rows.targets_S,
        real_N=rows.real_N,
        extra={"position_ids": rows.extra["position_ids"]},
    )


def padded_rows(batch: Batch, device: torch.device) -> Rows:
    """One sample a row, padded on the right, where no mask is needed. Refuses packed rows."""
    assert batch.segments_BT.max() <= 1, "packed rows need packed attention"
    return _rows(batch, device, np.ones_like(batch.segments_BT, dtype=bool), packing=False)


def _rows(batch: Batch, device: torch.device, keep_BT: Any, *, packing: bool) -> Rows:
    place_N = np.cumsum(keep_BT) - 1
    scored_S = np.flatnonzero(batch.scored_BT)
    targets_S = batch.tokens_BT.ravel()[scored_S]
    real_N = batch.segments_BT[keep_BT] > 0
    arrays = [batch.tokens_BT[keep_BT], place_N[scored_S - 1], targets_S, real_N]
    if packing:
        edges, positions_N = _edges(batch, keep_BT), batch.positions_BT[keep_BT]
        arrays += [positions_N, *_limits(edges)]
    moved = _move(arrays, device)
    extra: dict[str, Any] = {}
    if packing:
        extra["position_ids"] = moved[4][None]
        extra["packing"] = _packing(_spans(edges, positions_N), moved[5:], device)
    return Rows(
        tokens_BT=moved[0].view((1, -1) if packing else batch.tokens_BT.shape),
        index_S=moved[1],
        targets_S=moved[2],
        real_N=moved[3] > 0,
        extra=extra,
    )


def _move(arrays: list[Any], device: torch.device) -> list[Tensor]:
    """int64 on the device. One copy, which does not wait for what the device is doing."""
    bounds = np.cumsum([0, *map(len, arrays)])
    whole = torch.from_numpy(np.concatenate(arrays, dtype=np.int64))
    if device.type == "cuda":
        whole = whole.pin_memory().to(device, non_blocking=True)
    whole = whole.to(device)
    return [whole[a:b] for a, b in itertools.pairwise(bounds.tolist())]


def _edges(batch: Batch, keep_BT: Any) -> list[int]:
    """Where samples begin, and the end."""
    row_BT = np.broadcast_to(np.arange(len(batch.tokens_BT))[:, None], batch.tokens_BT.shape)
    key_N2 = np.stack([row_BT[keep_BT], batch.segments_BT[keep_BT]], 1)
    starts = np.flatnonzero(np.any(key_N2[1:] != key_N2[:-1], 1)) + 1
    return [0, *starts.tolist(), len(key_N2)]


def _limits(edges: list[int]) -> list[Any]:
    """For every token the begin and the end of its sample, and the edges."""
    lengths = np.diff(edges)
    return [np.repeat(edges[:-1], lengths), np.repeat(edges[1:], lengths), edges]


def _packing(spans: tuple[Span, ...], limits: list[Tensor], device: torch.device) -> Packing:
    if prepare(device):
        first_T, last_T = (limit.to(torch.int32) for limit in limits[:2])
        return Packing(bounds=spans, first_T=first_T, last_T=last_T)
    offsets = limits[2].to(torch.int32) if device.type == "cuda" else None
    return Packing(bounds=spans, offsets=offsets)


def _spans(edges: list[int], positions_N: Any) -> tuple[Span, ...]:
    """One whose positions begin at p > 0 goes on from the last that began at 0, of p tokens."""
    spans = list[Span]()
    for start, stop in itertools.pairwise(edges):
        shared = int(positions_N[start])
        whole = next(s for s in reversed(spans) if not s.shared) if shared else Span(0, 0)
        assert whole.stop - whole.start == shared
        spans.append(Span(start, stop, whole.start, whole.stop))
    return tuple(spans)
