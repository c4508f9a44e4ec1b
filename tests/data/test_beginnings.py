"""Beginnings that samples share stand once, and every sample can be read back."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pippin.data.batches import Batch, BatchPlan, Sample, lay_out, without_unread
from pippin.data.beginnings import WORTH, share_beginnings, shared_share, shared_text
from pippin.recipe import Train


@st.composite
def micro_batches(draw) -> Batch:
    """Rows of samples over two words, most of which begin with one of two prompts."""
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    prompts = [rng.integers(0, 2, n) for n in (draw(st.integers(1, 30)), 12)]
    rows = []
    for count in draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)):
        rows.append([])
        for _ in range(count):
            head = prompts[rng.integers(2)][: rng.integers(31)]
            tokens = np.concatenate([head, rng.integers(0, 2, rng.integers(1, 6))])
            scored = (np.arange(len(tokens)) > rng.integers(32)) & (rng.random(len(tokens)) > 0.3)
            rows[-1].append(Sample(tokens=tokens.astype(np.int32), scored=scored, row=0))
    width = max(sum(len(s.tokens) for s in row) for row in rows)
    return lay_out(rows, width + draw(st.integers(0, 3)))


def read_back(batch: Batch) -> list[tuple[list[int], list[bool], list[int]]]:
    """Tokens, mask and positions of every sample; what is only predicted goes with its sample."""
    found, beginning = [], ()
    for row in zip(
        batch.tokens_BT, batch.scored_BT, batch.positions_BT, batch.segments_BT, strict=True
    ):
        segments = row[3]
        owner = np.where(row[1] & (segments == 0), np.roll(segments, 1), segments)
        cuts = [0, *(np.flatnonzero(np.diff(owner)) + 1), len(owner)]
        for a, b in pairwise(cuts):
            if owner[a]:
                part = tuple(x[a:b].tolist() for x in row[:3])
                found.append((part, b < len(owner) and row[2][b] > 0 and owner[b] > 0))
    whole = []
    for part, begins in found:
        if part[2][0] == 0:
            beginning = part
        if part[2][0] > 0:
            assert part[2][0] == len(beginning[2])
            assert not part[1][0]
            whole.append(tuple(x + y for x, y in zip(beginning, part, strict=True)))
        elif begins:
            assert not any(part[1])
        else:
            whole.append(part)
    assert all(positions == [*range(len(positions))] for _, _, positions in whole)
    return sorted(whole)


@settings(max_examples=100, deadline=None)
@given(batch=micro_batches(), cut=st.booleans())
def test_every_sample_can_be_read_back(batch: Batch, cut: bool) -> None:
    batch = without_unread(batch) if cut else batch
    shared = share_beginnings(batch)
    assert read_back(shared) == read_back(batch)
    assert shared.scored_tokens == batch.scored_tokens
    assert shared is batch or shared.real_tokens < batch.real_tokens
    again = share_beginnings(batch)
    assert (again is batch) == (shared is batch)
    np.testing.assert_array_equal(again.tokens_BT, shared.tokens_BT)


def made(*parts: str, scored: int = 2) -> Batch:
    """A row of samples by their letters, the last ones scored."""
    tokens = [np.frombuffer(part.encode(), np.uint8).astype(np.int32) for part in parts]
    samples = [Sample(tokens=t, scored=np.arange(len(t)) >= len(t) - scored, row=0) for t in tokens]
    return lay_out([samples], sum(map(len, parts)) + 2)


def test_runs_are_those_that_save_most() -> None:
    """Two prompts that begin alike themselves: either alone saves more than what they share."""
    one, other = "x" * 10 + "a" * 20, "x" * 10 + "b" * 20
    shared = share_beginnings(made(*(p + tail for tail in ("123", "456") for p in (one, other))))
    assert bytes(shared.tokens_BT[0].tolist()).decode() == one + "123456" + other + "123456"
    assert (
        shared.segments_BT[0].tolist()
        == [1] * 30 + [2] * 3 + [3] * 3 + [4] * 30 + [5] * 3 + [6] * 3
    )
    assert shared.positions_BT[0, [0, 29, 30, 33, 36]].tolist() == [0, 29, 30, 30, 0]


def test_what_saves_nothing_stays_as_it_is() -> None:
    few = "x" * (WORTH - 1)
    for batch in (made(few + "123", few + "456"), made("x" * 40, "x" * 40, scored=39)):
        assert share_beginnings(batch) is batch
    batch = made(few + "123", few + "456", few + "456")
    assert share_beginnings(batch).real_tokens == batch.real_tokens - 2 * len(few)


def test_tokens_that_are_scored_are_never_shared() -> None:
    shared = share_beginnings(made("x" * 40, "x" * 40, scored=10))
    assert shared.real_tokens == 29 + 2 * 11
    assert not shared.scored_BT[0, :30].any()


def test_the_share_of_an_epoch() -> None:
    """Every row of four samples computes three prompts of 30 tokens less."""
    rng, prompt = np.random.default_rng(0), np.arange(31)
    tails = [rng.integers(100, 200, 9) for _ in range(400)]
    samples = [
        Sample(
            tokens=np.concatenate([prompt, tail]).astype(np.int32),
            scored=np.arange(40) >= 31,
            row=row,
        )
        for row, tail in enumerate(tails)
    ]
    plan = BatchPlan(samples, Train(row_tokens=160), seed=0)
    assert shared_share(plan) == 90 / 160
    assert shared_text(90 / 160) == (
        "56% of the tokens are beginnings that samples share: they are computed once",
    )
    assert shared_text(0.004) == ()
