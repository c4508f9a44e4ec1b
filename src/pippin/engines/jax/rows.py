"""Batches as arrays of few shapes: compiled code is made for one shape, so sizes are rounded up.

Shape letters: M micro-batches, B rows, T tokens, S scored positions.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pippin.data.batches import Batch

SMALLEST = 32
FIELDS = ("tokens_BT", "positions_BT", "segments_BT")


def bucket(count: int) -> int:
    """The next of 32, 48, 64, 96, 128, ...: two sizes for every doubling."""
    size = SMALLEST
    while size < count:
        size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
    return size


def power_of_two(count: int) -> int:
    """The next power of two, for numbers of rows."""
    return 1 << (count - 1).bit_length()


def padded(array_BT: NDArray[Any], rows: int, columns: int) -> NDArray[np.int32]:
    """Zeros below and on the right."""
    grown = ((0, rows - array_BT.shape[0]), (0, columns - array_BT.shape[1]))
    return np.pad(array_BT, grown).astype(np.int32)


def stack(
    batches: Sequence[Batch], rows: int, columns: int, chunk: int
) -> dict[str, NDArray[np.int32]]:
    """Micro-batches of one shape (M, B, T), and the positions whose next token is scored.

    `index` (M, S) counts in the flattened (B x T) positions, `targets` are the tokens to predict
    there, `count` (M,) is how many of S are real.
    """
    out = {
        name.removesuffix("_BT"): np.stack(
            [padded(getattr(batch, name), rows, columns) for batch in batches]
        )
        for name in FIELDS
    }
    capacity = -(-rows * columns // chunk) * chunk
    index_MS = np.zeros((len(batches), capacity), np.int32)
    targets_MS, count_M = np.zeros_like(index_MS), np.zeros(len(batches), np.int32)
    for number, batch in enumerate(batches):
        places = np.flatnonzero(padded(batch.scored_BT, rows, columns))
        index_MS[number, : len(places)] = places - 1
        targets_MS[number, : len(places)] = out["tokens"][number].reshape(-1)[places]
        count_M[number] = len(places)
    return {**out, "index": index_MS, "targets": targets_MS, "count": count_M}
