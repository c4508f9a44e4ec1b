"""Packing and the plan of updates."""

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pippin.data.batches import (
    Batch,
    BatchPlan,
    Sample,
    lay_out,
    pack,
    single_batches,
    without_unread,
)
from pippin.errors import DataError
from pippin.recipe import Train


def make_samples(lengths: list[int]) -> list[Sample]:
    """Samples whose every token tells the sample: 1000 x row + position."""
    made = []
    for row, length in enumerate(lengths):
        tokens = (1000 * row + np.arange(length)).astype(np.int32)
        scored = np.arange(length) >= max(1, length // 2)
        made.append(Sample(tokens=tokens, scored=scored, row=row))
    return made


def unpacked(batch: Batch) -> list[tuple[list[int], list[bool], list[int]]]:
    """Tokens, mask and positions of every sample in a batch, read back through its segments."""
    found = []
    for b in range(len(batch.tokens_BT)):
        for segment in range(1, batch.segments_BT[b].max() + 1):
            here = batch.segments_BT[b] == segment
            assert here.any()
            arrays = (batch.tokens_BT, batch.scored_BT, batch.positions_BT)
            found.append(tuple(array[b, here].tolist() for array in arrays))
    return found


def realistic(count: int) -> list[int]:
    rng = np.random.default_rng(0)
    return np.clip(rng.lognormal(np.log(94), 0.6, count), 5, 1024).astype(int).tolist()


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    packing=st.booleans(),
    batch_rows=st.integers(1, 3),
    accumulate=st.integers(1, 3),
    seed=st.integers(0, 5),
)
def test_an_epoch_holds_every_sample_once(
    lengths: list[int], packing: bool, batch_rows: int, accumulate: int, seed: int
) -> None:
    samples = make_samples(lengths)
    keys = {"packing": packing, "batch_rows": batch_rows, "accumulate": accumulate}
    plan = BatchPlan(samples, Train(row_tokens=40, **keys), seed)
    for epoch in (0, 1):
        steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
        updates = [plan.batches(step) for step in steps]
        found = [one for update in updates for batch in update for one in unpacked(batch)]
        wanted = [(s.tokens.tolist(), s.scored.tolist(), [*range(len(s.tokens))]) for s in samples]
        assert sorted(found) == sorted(wanted)
        assert all(len(update) == accumulate for update in updates[:-1])
        whole = [batch for update in updates for batch in update][:-1]
        assert all(batch.tokens_BT.shape == (batch_rows, 40) for batch in whole)


def test_padding_is_nothing() -> None:
    (batch,) = BatchPlan(make_samples([3, 4]), Train(row_tokens=10), 0).batches(0)
    empty = batch.segments_BT == 0
    assert empty.sum() == 3
    assert not batch.scored_BT[empty].any()
    assert batch.real_tokens == 7
    assert batch.segments_BT.tolist() == [[1] * 4 + [2] * 3 + [0] * 3]
    assert batch.positions_BT[0, :7].tolist() == [0, 1, 2, 3, 0, 1, 2]


def test_without_packing_a_row_holds_one_sample() -> None:
    plan = BatchPlan(make_samples([3, 4, 9]), Train(row_tokens=10, packing=False), 0)
    batches = [plan.batches(step)[0] for step in range(3)]
    assert plan.steps_per_epoch == 3
    assert {batch.tokens_BT.shape for batch in batches} == {(1, 10)}
    assert {int(batch.segments_BT.max()) for batch in batches} == {1}
    assert plan.fill == pytest.approx(16 / 30)


def test_last_window_is_kept() -> None:
    keys = {"row_tokens": 10, "batch_rows": 2, "accumulate": 2}
    plan = BatchPlan(make_samples([10] * 7), Train(**keys), 0)
    assert plan.steps_per_epoch == 2
    assert [len(batch.tokens_BT) for batch in plan.batches(1)] == [2, 1]


def test_fill_and_speed_on_realistic_lengths() -> None:
    samples = make_samples(realistic(100_000))
    start = time.process_time()
    plan = BatchPlan(samples, Train(row_tokens=1024), 0)
    assert time.process_time() - start < 5
    assert plan.fill > 0.99
    assert plan.fill == pytest.approx(sum(len(s.tokens) for s in samples) / (plan.rows * 1024))


def test_long_samples_still_fill_rows() -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(20, 512, 2000).tolist()
    assert BatchPlan(make_samples(lengths), Train(row_tokens=512), 0).fill > 0.9


def test_update_depends_on_its_number_alone() -> None:
    samples = make_samples(realistic(300))
    train = Train(row_tokens=1024, batch_rows=2, accumulate=2)
    walked, resumed = BatchPlan(samples, train, 7), BatchPlan(samples, train, 7)
    steps = 3 * walked.steps_per_epoch
    seen = {step: walked.batches(step) for step in range(steps)}
    for step in (steps - 1, 0, walked.steps_per_epoch + 1):
        for one, other in zip(seen[step], resumed.batches(step), strict=True):
            assert one.tokens_BT.tobytes() == other.tokens_BT.tobytes()
            assert one.scored_BT.tobytes() == other.scored_BT.tobytes()


def test_seed_and_epoch_change_the_order() -> None:
    samples = make_samples(realistic(200))
    plans = [BatchPlan(samples, Train(), seed) for seed in (0, 1)]
    first = plans[0].batches(0)[0].tokens_BT
    assert (first != plans[1].batches(0)[0].tokens_BT).any()
    assert (first != plans[0].batches(plans[0].steps_per_epoch)[0].tokens_BT).any()
    neighbours = [company(plans[0], epoch) for epoch in (0, 1)]
    assert neighbours[0] != neighbours[1], "samples must meet other samples in the next epoch"


def company(plan: BatchPlan, epoch: int) -> set[frozenset[int]]:
    """Which samples share a row in an epoch."""
    steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
    rows = [batch.tokens_BT[0] // 1000 for step in steps for batch in plan.batches(step)]
    return {frozenset(row.tolist()) for row in rows}


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=80))
def test_pack_is_best_fit_decreasing(lengths: list[int]) -> None:
    rows: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fits = [row for row in rows if sum(row) + length <= 30]
        if fits:
            max(fits, key=sum).append(length)
        else:
            rows.append([length])
    array = np.array(lengths, np.int64)
    ours = pack(array, np.arange(len(lengths)), 30)
    assert sorted(sum(lengths[i] for i in row) for row in ours) == sorted(map(sum, rows))


def test_sample_longer_than_a_row() -> None:
    with pytest.raises(
        DataError, match=r"1 of 2 samples; .* 11 tokens, train.row_tokens is 10"
    ) as e:
        BatchPlan(make_samples([3, 11]), Train(row_tokens=10), 0)
    assert "train.row_tokens = 11" in e.value.hint
    with pytest.raises(DataError, match="no sample"):
        BatchPlan([], Train(), 0)


def test_single_batches() -> None:
    samples = make_samples([3, 9, 1, 5, 7])
    batches = single_batches(samples, 2)
    assert [batch.tokens_BT.shape for batch in batches] == [(2, 9), (2, 5), (1, 1)]
    found = sorted(one[0] for batch in batches for one in unpacked(batch))
    assert found == sorted(s.tokens.tolist() for s in samples)
    assert all(batch.segments_BT[:, 0].all() for batch in batches), "padding goes to the right"
    assert single_batches([], 2) == []


def test_a_last_token_is_not_read() -> None:
    """In a row that one sample fills, too; where nothing is scored all stay."""
    sample = make_samples([4])[0]
    assert without_unread(lay_out([[sample]], 4)).segments_BT.tolist() == [[1, 1, 1, 0]]
    silent = lay_out([[replace(sample, scored=np.zeros(4, bool))]], 4)
    assert without_unread(silent) is silent
