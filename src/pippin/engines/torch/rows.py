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
from pippin.engines.torch.attention import Packing


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
    scored_N = batch.scored_BT[keep_BT]
    tokens_N = batch.tokens_BT[keep_BT].astype(np.int64)
    index_S = np.flatnonzero(scored_N)
    extra: dict[str, Any] = {}
    shape: tuple[int, ...] = batch.tokens_BT.shape
    if packing:
        shape = (1, -1)
        positions_N = batch.positions_BT[keep_BT].astype(np.int64)
        extra["position_ids"] = torch.from_numpy(positions_N[None]).to(device)
        extra["packing"] = _packing(batch, keep_BT, device)
    return Rows(
        tokens_BT=torch.from_numpy(tokens_N.reshape(shape)).to(device),
        index_S=torch.from_numpy(index_S - 1).to(device),
        targets_S=torch.from_numpy(tokens_N[index_S]).to(device),
        real_N=torch.from_numpy(batch.segments_BT[keep_BT] > 0).to(device),
        extra=extra,
    )


def _packing(batch: Batch, keep_BT: Any, device: torch.device) -> Packing:
    row_BT = np.broadcast_to(np.arange(len(batch.tokens_BT))[:, None], batch.tokens_BT.shape)
    key_N2 = np.stack([row_BT[keep_BT], batch.segments_BT[keep_BT]], 1)
    starts = np.flatnonzero(np.any(key_N2[1:] != key_N2[:-1], 1)) + 1
    edges = [0, *starts.tolist(), len(key_N2)]
    offsets = None
    if device.type == "cuda":
        offsets = torch.tensor(edges, dtype=torch.int32, device=device)
    return Packing(bounds=tuple(itertools.pairwise(edges)), offsets=offsets)
