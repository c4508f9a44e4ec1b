"""A Batch as one forward pass reads it: samples in one row, or right-padded rows as they are.

Shape letters: B rows, T tokens, N tokens of all rows, S scored positions.
"""

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from numpy.typing import NDArray

from pippin.data.batches import Batch
from pippin.engines.mlx import slots
from pippin.engines.mlx.attention import Packing


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """What one forward pass reads: `index_S` are the positions whose next token is scored.

    They count in the flattened (B x T) positions, as `real_N` does, which are no padding.
    `targets_S` are the tokens to predict; `packing` is None where every sample has its own row.
    """

    tokens_BT: mx.array
    index_S: mx.array
    targets_S: mx.array
    real_N: mx.array
    packing: Packing | None = None

    def cache(self, network: nn.Module) -> Any:
        """What the layers get in the place of their caches."""
        layers: Any = network.layers
        return None if self.packing is None else [self.packing] * len(layers)


def packed_rows(batch: Batch, *, dense: bool = False) -> Rows:
    """All samples of the batch in one row (1, N), without padding."""
    keep_BT, scored_S = batch.segments_BT > 0, np.flatnonzero(batch.scored_BT)
    place_N, tokens_N = np.cumsum(keep_BT) - 1, batch.tokens_BT[keep_BT]
    positions_N = batch.positions_BT[keep_BT]
    edges = (*_starts(positions_N, batch.segments_BT[keep_BT]).tolist(), len(tokens_N))
    return Rows(
        tokens_BT=mx.array(tokens_N[None]),
        index_S=mx.array(place_N[scored_S - 1]),
        targets_S=mx.array(batch.tokens_BT.ravel()[scored_S]),
        real_N=mx.arange(len(tokens_N)),
        packing=_packing(edges, positions_N, dense=dense),
    )


def _packing(edges: tuple[int, ...], positions_T: NDArray[np.int32], **how: Any) -> Packing:
    return Packing(edges=edges, positions_T=positions_T, offset=mx.array(positions_T), **how)


def _starts(positions_N: NDArray[np.int32], segments_N: NDArray[np.int32]) -> NDArray[np.int64]:
    """Where segments begin: samples, and what goes on from a beginning."""
    return np.flatnonzero((positions_N == 0) | (np.diff(segments_N, prepend=0) != 0))


def cut(batch: Batch, tokens: int) -> list[Batch]:
    """The batch's samples in parts of at least `tokens`, each part one row.

    A beginning stands in every part that goes on from it; longer ones wait for more of that.
    """
    keep_BT = (batch.segments_BT > 0) | batch.scored_BT
    names = ("tokens_BT", "positions_BT", "segments_BT", "scored_BT")
    flat = {name: getattr(batch, name)[keep_BT] for name in names}
    segments_N = flat["segments_BT"]
    owner_N = np.where(segments_N == 0, np.roll(segments_N, 1), segments_N)  # if only predicted
    places = _parts(flat["positions_BT"], owner_N, tokens)
    return [Batch(**{n: array[part][None] for n, array in flat.items()}) for part in places]


def _parts(
    positions_N: NDArray[np.int32], segments_N: NDArray[np.int32], tokens: int
) -> list[NDArray[np.int64]]:
    """Where the tokens of each part stand."""
    parts: list[list[NDArray[np.int64]]] = [[]]
    root, size = np.arange(0), 0
    for segment in np.split(np.arange(len(positions_N)), _starts(positions_N, segments_N)[1:]):
        begins = positions_N[segment[0]] == 0
        wanted = tokens if begins else max(tokens, len(root) + min(len(root), tokens))
        if size >= wanted and (begins or parts[-1][-1] is not root):
            parts.append([] if begins else [root])
            size = sum(map(len, parts[-1]))
        parts[-1].append(segment)
        root, size = segment if begins else root, size + len(segment)
    return [np.concatenate(part) for part in parts]


def slotted_rows(batch: Batch) -> Rows:
    """The same for a GPU: filled up with a sample of nobody's, attention in few large calls."""
    rows = packed_rows(batch)
    assert rows.packing is not None
    count = len(rows.real_N)
    missing = slots.TILE - count % slots.TILE
    edges = (*rows.packing.edges, count + missing)
    positions_T = np.append(rows.packing.positions_T, np.arange(missing, dtype=np.int32))
    packing = _packing(edges, positions_T, slots=slots.find_slots(edges))
    tokens_BT = mx.pad(rows.tokens_BT, [(0, 0), (0, missing)])
    return replace(rows, tokens_BT=tokens_BT, packing=packing)


def masked_rows(batch: Batch) -> Rows:
    """The same for models that need a mask they can add up: (N, N) of it."""
    return packed_rows(batch, dense=True)


def padded_rows(batch: Batch) -> Rows:
    """One sample a row, padded on the right, where no mask is needed. Refuses packed rows."""
    assert batch.segments_BT.max() <= 1, "packed rows need packed attention"
    index_S = np.flatnonzero(batch.scored_BT)
    return Rows(
        tokens_BT=mx.array(batch.tokens_BT),
        index_S=mx.array(index_S - 1),
        targets_S=mx.array(batch.tokens_BT.ravel()[index_S]),
        real_N=mx.array(np.flatnonzero(batch.segments_BT > 0)),
    )
