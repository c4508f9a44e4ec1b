"""Tokenized rows made to fit `data.max_seq_len`: refused, cut, dropped, in blocks; all counted."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pippin.data.batches import Sample
from pippin.data.shapes import Row
from pippin.data.turns import Marked
from pippin.errors import DataError
from pippin.figures import counted
from pippin.recipe import Data


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokenized:
    """A split as samples.

    `lengths` int32 holds the tokens of every sample before it was cut, those dropped included;
    `notices` say what was cut, dropped or done differently, and why.
    """

    samples: list[Sample]
    notices: list[str]
    cut: int
    dropped: int
    lengths: NDArray[np.int32]


def fit(rows: Sequence[Row], marked: Sequence[Marked], data: Data) -> Tokenized:
    """Samples of at most `data.max_seq_len` tokens.

    Documents are trained in blocks and lose nothing. Any other longer row is an error, is cut at
    its end, or is dropped, as `data.too_long` says; so is a cut row with nothing left to train.
    """
    limit = data.max_seq_len
    samples: list[Sample] = []
    lengths: list[int] = []
    cut = dropped = 0
    _refuse_too_long(rows, marked, data)
    for index, (row, one) in enumerate(zip(rows, marked, strict=True)):
        parts = _blocks(one, index, limit) if row.document else [_sample(one, index, 0, limit)]
        long = len(one.ids) > limit and not row.document
        drop = long and (data.too_long == "drop" or not parts[0].scored.any())
        lengths += [len(one.ids)] if long else [len(part.tokens) for part in parts]
        samples += [] if drop else parts
        dropped += drop
        cut += long and not drop
    notices = _notices(rows, marked, data, cut, dropped)
    if not samples:
        raise DataError(
            f"longer than data.max_seq_len = {limit}, so that none is left: "
            f"{counted(len(rows), 'row')}",
            f"raise data.max_seq_len to {max(lengths)}",
        )
    return Tokenized(
        samples=samples,
        notices=notices,
        cut=cut,
        dropped=dropped,
        lengths=np.array(lengths, np.int32),
    )


def _refuse_too_long(rows: Sequence[Row], marked: Sequence[Marked], data: Data) -> None:
    sizes = [
        (len(one.ids), row.where)
        for row, one in zip(rows, marked, strict=True)
        if len(one.ids) > data.max_seq_len and not row.document
    ]
    if sizes and data.too_long == "error":
        longest, where = max(sizes)
        raise DataError(
            f"longer than data.max_seq_len = {data.max_seq_len}: {len(sizes)} of "
            f"{counted(len(rows), 'row')}; the longest, {where}, has {longest} tokens",
            f'set data.max_seq_len = {longest}, or data.too_long = "cut" or "drop"',
        )


def _sample(one: Marked, index: int, start: int, stop: int) -> Sample:
    scored = one.scored[start:stop].copy()
    scored[0] = False
    return Sample(tokens=np.array(one.ids[start:stop], np.int32), scored=scored, row=index)


def _blocks(one: Marked, index: int, limit: int) -> list[Sample]:
    """Consecutive pieces that share one token: the last of one is the context that opens the next,

    so every token but the document's first is trained exactly once.
    """
    step = max(limit - 1, 1)
    starts = range(0, max(len(one.ids) - 1, 1), step)
    return [_sample(one, index, start, start + limit) for start in starts]


def _notices(
    rows: Sequence[Row], marked: Sequence[Marked], data: Data, cut: int, dropped: int
) -> list[str]:
    limit = data.max_seq_len
    found = []
    if cut:
        found.append(
            f"{cut} of {counted(len(rows), 'row')} cut to data.max_seq_len = {limit} tokens; "
            "what was cut off, end token included, is not trained"
        )
    if dropped:
        why = "" if data.too_long == "drop" else ": cut there, they have nothing left to train"
        found.append(
            f"{dropped} of {counted(len(rows), 'row')} dropped: longer than data.max_seq_len = "
            f"{limit}{why}"
        )
    for row, one in zip(rows, marked, strict=True):
        if row.document and len(one.ids) > limit:
            count = len(_blocks(one, 0, limit))
            found.append(
                f"{row.where}: {len(one.ids)} tokens in {counted(count, 'block')} of {limit}"
            )
    return found
