"""The divergence against a full-distribution one in float64, and rows that must be the same."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pippin.data.batches import Sample
from pippin.errors import PippinError
from pippin.stages.distribution import (
    FLOOR,
    Distribution,
    divergence,
    gain,
    gain_kept,
    load,
    load_for,
    row_digest,
    save,
)


def log_softmax(logits):
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def full(logp, logq):
    return (np.exp(logp) * (logp - logq)).sum(axis=1)


def kept(logp, logq, k):
    """Both models' log-probabilities of p's k likeliest tokens, rounded as they are stored."""
    ids = np.argsort(-logp, axis=1)[:, :k]
    return [np.take_along_axis(x, ids, 1).astype(np.float32) for x in (logp, logq)]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), spread=st.sampled_from([0.1, 1.0, 6.0, 30.0]))
def test_whole_vocabulary_gives_the_full_divergence(seed, spread):
    rng = np.random.default_rng(seed)
    logp, logq = (log_softmax(spread * rng.standard_normal((50, 31))) for _ in range(2))
    assert divergence(*kept(logp, logq, 31)) == pytest.approx(full(logp, logq), abs=2e-5, rel=1e-5)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), spread=st.sampled_from([0.1, 1.0, 6.0, 30.0]))
def test_fewer_tokens_give_a_growing_lower_bound(seed, spread):
    """Growing while q leaves something to the rest: below FLOOR its surprise is held finite."""
    rng = np.random.default_rng(seed)
    logp, logq = (log_softmax(spread * rng.standard_normal((50, 31))) for _ in range(2))
    before = np.full(50, -2e-5)
    for k in (1, 2, 5, 12, 30):
        bound = divergence(*kept(logp, logq, k))
        _, top_q = kept(logp, logq, k)
        granted = 1.0 - np.exp(top_q).sum(axis=1) > FLOOR
        assert (bound >= before - 2e-5)[granted].all()
        assert (bound <= full(logp, logq) + 2e-5).all()
        before = bound


def test_rest_that_q_denies_is_dear_but_finite():
    """p puts 10 % outside its first token, q nothing that float32 can show."""
    found = divergence(np.log([[0.9]]), np.array([[0.0]]))
    assert np.isfinite(found).all()
    assert found[0] > 1.0


def test_equal_models_diverge_by_nothing():
    logp = log_softmax(np.random.default_rng(0).standard_normal((9, 12)))
    assert divergence(*kept(logp, logp, 4)) == pytest.approx(np.zeros(9), abs=1e-12)


def samples(count, seed=0):
    rng = np.random.default_rng(seed)
    for row in range(count):
        tokens = rng.integers(0, 99, 6).astype(np.int32)
        scored = np.arange(6) >= rng.integers(1, 5)
        yield Sample(tokens=tokens, scored=scored, row=row)


def distribution(rows, k=3):
    counts = np.array([row.scored.sum() for row in rows], np.int32)
    positions = counts.sum()
    return Distribution(
        ids_NK=np.arange(positions * k, dtype=np.int32).reshape(-1, k),
        logprobs_NK=-np.arange(positions * k, dtype=np.float32).reshape(-1, k),
        losses_S=np.arange(len(rows), dtype=np.float64) + 0.5,
        counts_S=counts,
        digests_S=np.array([row_digest(row) for row in rows], np.uint64),
    )


def test_a_part_of_the_rows_is_found_again_in_any_order(tmp_path):
    rows = list(samples(5))
    stored = distribution(rows)
    save(tmp_path, stored)
    part = load_for(tmp_path, [rows[3], rows[1]])
    assert part.losses_S.tolist() == [3.5, 1.5]
    starts = np.concatenate([[0], np.cumsum(stored.counts_S)])
    expected = np.concatenate([stored.ids_NK[starts[r] : starts[r + 1]] for r in (3, 1)])
    np.testing.assert_array_equal(part.ids_NK, expected)
    assert part.loss == pytest.approx(5.0 / part.counts_S.sum())


def test_the_error_of_a_gain_is_that_of_leaving_each_row_out():
    """The delete-one jackknife; of rows of one length, the standard error of a mean."""
    rng = np.random.default_rng(0)
    for counts in (np.full(40, 5, np.int32), rng.integers(1, 30, 400).astype(np.int32)):
        rows = len(counts)
        base = replace(distribution(list(samples(rows))), counts_S=counts)
        gains = counts * (0.6 + rng.standard_normal(rows))
        mean, error = gain(base, replace(base, losses_S=base.losses_S - gains))
        without = (gains.sum() - gains) / (counts.sum() - counts)
        assert mean == pytest.approx(gains.sum() / counts.sum())
        assert error == pytest.approx(np.std(without) * (rows - 1) ** 0.5, rel=0.01)
        tuned = replace(base, losses_S=base.losses_S - gains)
        found = replace(base, losses_S=base.losses_S - gains * rng.uniform(0.6, 1.1, rows))
        kept, error = gain_kept(base, tuned, found)
        left = base.losses_S - found.losses_S
        without = (left.sum() - left) / (gains.sum() - gains)
        assert kept == pytest.approx(left.sum() / gains.sum())
        assert error == pytest.approx(np.std(without) * (rows - 1) ** 0.5, rel=0.2)
    one = replace(base, losses_S=base.losses_S[:1], counts_S=counts[:1])
    assert gain(one, one) == (0.0, 0.0)


def test_stored_and_read_back_bit_for_bit(tmp_path):
    stored = distribution(list(samples(4)))
    save(tmp_path, stored)
    read = load(tmp_path)
    for name in Distribution.__dataclass_fields__:
        a, b = getattr(stored, name), getattr(read, name)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("change", ["token", "mask"])
def test_other_rows_are_refused_with_both_numbers(tmp_path, change):
    rows = list(samples(3))
    save(tmp_path, distribution(rows))
    tokens, scored = rows[2].tokens.copy(), rows[2].scored.copy()
    if change == "token":
        tokens[0] += 1
    else:
        scored[-1] = not scored[-1]
    with pytest.raises(PippinError, match="2 of these 3") as caught:
        load_for(tmp_path, [*rows[:2], Sample(tokens=tokens, scored=scored, row=2)])
    assert "--redo evaluate" in caught.value.hint


def test_a_folder_without_an_evaluation_is_named(tmp_path):
    with pytest.raises(PippinError, match="holds no evaluation"):
        load(tmp_path)


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "topk.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
    with pytest.raises(PippinError, match=r"topk\.safetensors is damaged") as caught:
        load(tmp_path)
    assert "--redo evaluate" in caught.value.hint
