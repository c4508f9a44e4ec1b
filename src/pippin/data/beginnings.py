"""What samples of a micro-batch begin with in common, put where it is computed once.

Shape letters: B rows, T tokens, N tokens of the shared form.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pippin.data.batches import Batch, BatchPlan, without_unread

LOOKED = 64  # updates
WORTH_TELLING = 0.005  # of all tokens
WORTH = 4  # tokens that a beginning has to save: attention meets one more segment


def share_beginnings(batch: Batch) -> Batch:
    """One row (1, N) in which a beginning stands once, the rests of its samples behind it.

    A beginning is a segment with positions from 0. A segment whose positions begin at p > 0 goes on
    from the nearest one before it that begins at 0, which has p tokens. No token of a beginning is
    scored, nor is the first one of a rest: what predicts a scored token is its left neighbour.
    Padding is gone, but for the tokens that are only predicted. The batch itself where nothing is
    saved.
    """
    samples = _samples(batch)
    heads = [_unscored(batch, sample) for sample in samples]
    order = sorted(range(len(samples)), key=heads.__getitem__)
    runs = _runs([_common(heads[a], heads[b]) for a, b in pairwise(order)])
    segments: list[NDArray[np.int64]] = []
    for first, stop, length in runs:
        if length:
            segments.append(samples[order[first]][:length])
        segments += [samples[i][length:] for i in order[first:stop]]
    return batch if len(segments) == len(samples) else _taken(batch, segments)


def shared_share(plan: BatchPlan) -> float:
    """The share of an epoch's tokens that another sample of the micro-batch has computed too.

    Estimated from up to LOOKED updates, spread over the first epoch.
    """
    count = min(LOOKED, plan.steps_per_epoch)
    steps = np.linspace(0, plan.steps_per_epoch - 1, count).astype(int).tolist()
    batches = [batch for step in steps for batch in plan.batches(step)]
    read = [without_unread(batch) for batch in batches]
    saved = sum(batch.real_tokens - share_beginnings(batch).real_tokens for batch in read)
    return saved / sum(batch.real_tokens for batch in batches)


def shared_text(share: float) -> tuple[str, ...]:
    """The share in words, where it is worth them."""
    text = f"{share:.0%} of the tokens are beginnings that samples share: they are computed once"
    return (text,) if share >= WORTH_TELLING else ()


def _samples(batch: Batch) -> list[NDArray[np.int64]]:
    """Where the tokens of each sample lie in the flattened batch, its last predicted one too."""
    left_BT = np.pad(batch.segments_BT, ((0, 0), (1, 0)))[:, :-1]
    predicted_BT = batch.scored_BT & (batch.segments_BT == 0)
    owner_BT = np.where(predicted_BT, left_BT, batch.segments_BT)
    kept = np.flatnonzero(owner_BT)
    row_N = kept // owner_BT.shape[1]
    key_2N = np.stack([row_N, owner_BT.ravel()[kept]])
    cuts = np.flatnonzero((key_2N[:, 1:] != key_2N[:, :-1]).any(0)) + 1
    return np.split(kept, cuts)


def _unscored(batch: Batch, sample: NDArray[np.int64]) -> list[int]:
    """The tokens that a sample may share: those before the one that predicts its first scored."""
    scored = np.flatnonzero(batch.scored_BT.ravel()[sample])
    stop = scored[0] if len(scored) else len(sample)
    return batch.tokens_BT.ravel()[sample[: stop - 1]].tolist()


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many numbers two lists begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _runs(common: Sequence[int]) -> list[tuple[int, int, int]]:
    """Sorted samples cut into runs (first, stop, length of their beginning) that save the most.

    `common` is what neighbours have in common. `saved[n]` is the best of the first n samples.
    """
    count = len(common) + 1
    saved, came = np.zeros(count + 1, np.int64), [(0, 0)] * (count + 1)
    lengths = np.zeros(count, np.int64)
    for last in range(count):
        if last:
            lengths[last - 1] = common[last - 1]
            np.minimum(lengths[:last], common[last - 1], out=lengths[:last])
        gains = saved[:last] + lengths[:last] * np.arange(last, 0, -1) - WORTH
        first = int(gains.argmax()) if last else 0
        better = last > 0 and gains[first] > saved[last]
        saved[last + 1] = gains[first] if better else saved[last]
        came[last + 1] = (first, int(lengths[first])) if better else (last, 0)
    return _walked(came)


def _walked(came: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """The runs from the last one back, then turned."""
    runs, stop = [], len(came) - 1
    while stop:
        first, length = came[stop]
        runs.append((first, stop, length))
        stop = first
    return runs[::-1]


def _taken(batch: Batch, segments: Sequence[NDArray[np.int64]]) -> Batch:
    places_N = np.concatenate(segments)
    number_N = np.repeat(np.arange(1, len(segments) + 1), [len(s) for s in segments])
    real_N = batch.segments_BT.ravel()[places_N] > 0
    return Batch(
        tokens_BT=batch.tokens_BT.ravel()[places_N][None],
        positions_BT=batch.positions_BT.ravel()[places_N][None],
        segments_BT=np.where(real_N, number_N, 0).astype(np.int32)[None],
        scored_BT=batch.scored_BT.ravel()[places_N][None],
    )
