"""Samples packed into rows of constant length, in an order that is a function of seed and data.

Shape letters: B rows, T tokens.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pippin.errors import DataError
from pippin.figures import counted
from pippin.recipe import Train


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One tokenized row: `tokens` int32 (T,), `scored` bool (T,) marks what must be predicted.

    `row` is the index in its split. `scored[0]` is always false: nothing predicts the first token.
    """

    tokens: NDArray[np.int32]
    scored: NDArray[np.bool_]
    row: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Packed rows. `segments` numbers the samples of a row from 1; 0 is padding.

    Positions restart with every sample; a sample attends to itself alone. `scored` marks the tokens
    that are predicted from the token before them.
    """

    tokens_BT: NDArray[np.int32]
    positions_BT: NDArray[np.int32]
    segments_BT: NDArray[np.int32]
    scored_BT: NDArray[np.bool_]

    @property
    def scored_tokens(self) -> int:
        """How many tokens enter the loss."""
        return int(self.scored_BT.sum())

    @property
    def real_tokens(self) -> int:
        """How many tokens are not padding."""
        return int((self.segments_BT > 0).sum())


class BatchPlan:
    """Which samples go into which row of which update: a pure function of samples, recipe, seed.

    Every epoch holds every sample once. All samples of an epoch are packed together (best fit,
    longest first; which of equally long samples share a row is drawn anew), then the rows are
    shuffled. How many rows that takes depends on the lengths alone, so every epoch has equally many
    updates, and update number `step` is known without walking through those before it.
    """

    def __init__(self, samples: Sequence[Sample], train: Train, seed: int) -> None:
        """Raises DataError without samples, or where one is longer than a row."""
        self._samples = samples
        self._train = train
        self._seed = seed
        self._lengths = np.array([len(s.tokens) for s in samples], dtype=np.int64)
        _check_lengths(self._lengths, train.row_tokens)
        self._epoch = 0
        self._newest: tuple[int, list[Batch]] | None = None
        self._rows = self._arrange(0)
        self.rows: int = len(self._rows)
        self.steps_per_epoch: int = -(-self.rows // (train.batch_rows * train.accumulate))
        self.fill: float = float(self._lengths.sum()) / (self.rows * train.row_tokens)

    def batches(self, step: int) -> list[Batch]:
        """The micro-batches of update `step`, counted from 0 over all epochs.

        The last update of an epoch holds the rows that are left: fewer batches, the last of them
        with fewer rows. Asked for the same update again, it gives the same objects.
        """
        if self._newest is None or self._newest[0] != step:
            self._newest = step, self._batches(step)
        return self._newest[1]

    def _batches(self, step: int) -> list[Batch]:
        epoch, update = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._rows = epoch, self._arrange(epoch)
        size = self._train.batch_rows
        first = update * size * self._train.accumulate
        last = min(first + size * self._train.accumulate, self.rows)
        starts = range(first, last, size)
        return [self._batch(self._rows[start : min(start + size, last)]) for start in starts]

    def _arrange(self, epoch: int) -> list[list[int]]:
        rng = np.random.default_rng([self._seed, epoch])
        order = rng.permutation(len(self._samples))
        if self._train.packing:
            rows = pack(self._lengths, order, self._train.row_tokens)
        else:
            rows = [[int(i)] for i in order]
        return [rows[i] for i in rng.permutation(len(rows))]

    def _batch(self, rows: list[list[int]]) -> Batch:
        return lay_out([[self._samples[i] for i in row] for row in rows], self._train.row_tokens)


def pack(lengths: NDArray[np.int64], order: NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Samples by row: best fit, longest first; `order` breaks ties. No length exceeds `capacity`.

    The rows with a given room are a stack, the rooms in use a sorted list of at most `capacity`
    numbers, so one sample costs one binary search.
    """
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    for index in order[np.argsort(-lengths[order], kind="stable")].tolist():
        length = int(lengths[index])
        place = bisect_left(rooms, length)
        if place == len(rooms):
            row, room = len(rows), capacity
            rows.append([])
        else:
            room = rooms[place]
            row = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[place]
        rows[row].append(index)
        _offer(by_room, rooms, row, room - length)
    return rows


def single_batches(samples: Sequence[Sample], max_rows: int) -> list[Batch]:
    """One sample a row, padded on the right, longest first so that memory peaks at the start."""
    ordered = sorted(samples, key=lambda sample: -len(sample.tokens))
    groups = (ordered[i : i + max_rows] for i in range(0, len(ordered), max_rows))
    return [lay_out([[sample] for sample in group], len(group[0].tokens)) for group in groups]


def lay_out(rows: Sequence[Sequence[Sample]], length: int) -> Batch:
    """Put the samples of each row one after another into arrays of `length` tokens."""
    shape = (len(rows), length)
    tokens_BT, positions_BT = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    segments_BT, scored_BT = np.zeros(shape, np.int32), np.zeros(shape, np.bool_)
    for b, row in enumerate(rows):
        start = 0
        for number, sample in enumerate(row, 1):
            span = slice(start, start + len(sample.tokens))
            tokens_BT[b, span] = sample.tokens
            positions_BT[b, span] = np.arange(len(sample.tokens))
            segments_BT[b, span] = number
            scored_BT[b, span] = sample.scored
            assert not scored_BT[b, start], "nothing predicts the first token of a sample"
            start = span.stop
    return Batch(
        tokens_BT=tokens_BT,
        positions_BT=positions_BT,
        segments_BT=segments_BT,
        scored_BT=scored_BT,
    )


def without_unread(batch: Batch) -> Batch:
    """Padding in the place of tokens that no scored one follows in their sample.

    The last token of a sample is only ever predicted. All stay where no token is scored.
    """
    length = batch.scored_BT.shape[1]
    scored_at = np.where(batch.scored_BT, np.arange(length), length)
    next_BT = np.minimum.accumulate(scored_at[:, ::-1], 1)[:, ::-1]
    next_BT = np.pad(next_BT, ((0, 0), (0, 1)), constant_values=length)[:, 1:]
    segments = np.pad(batch.segments_BT, ((0, 0), (0, 1)))
    read_BT = np.take_along_axis(segments, next_BT, 1) == batch.segments_BT
    read = np.where(read_BT, batch.segments_BT, 0)
    return replace(batch, segments_BT=read) if read.any() else batch


def _offer(by_room: dict[int, list[int]], rooms: list[int], row: int, room: int) -> None:
    if room == 0:
        return
    if room not in by_room:
        by_room[room] = []
        insort(rooms, room)
    by_room[room].append(row)


def _check_lengths(lengths: NDArray[np.int64], row_tokens: int) -> None:
    if len(lengths) == 0:
        raise DataError("no sample to train on", "look at the rows with `pippin data RECIPE`")
    longest = int(lengths.max())
    if longest > row_tokens:
        raise DataError(
            f"too long for a row: {int((lengths > row_tokens).sum())} of "
            f"{counted(len(lengths), 'sample')}; "
            f"the longest has {longest} tokens, train.row_tokens is {row_tokens}",
            f"set train.row_tokens = {longest}, or lower data.max_seq_len to {row_tokens}",
        )
