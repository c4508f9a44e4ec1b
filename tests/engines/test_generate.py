"""Decoding with a cache: batched equals one by one, decode equals prefill, stops and seeds."""

import numpy as np
import pytest
import torch

from pippin.engines import Sampling
from pippin.engines.torch.generate import sample

pytestmark = pytest.mark.torch

KINDS = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "cohere", "gpt_oss", "mamba2"]


@pytest.fixture(scope="session")
def prompts():
    rng = np.random.default_rng(11)
    return [rng.integers(3, 97, n).astype(np.int32) for n in (3, 9, 1, 6)]


def columns(steps, rows):
    """Each prompt's tokens without the Nones at its end."""
    return [[step[row] for step in steps if step[row] is not None] for row in range(rows)]


@pytest.mark.parametrize("kind", KINDS)
def test_batched_greedy_equals_one_by_one_without_a_cache(kind, tiny, engine, prompts):
    """The reference runs the whole sequence anew for every token."""
    model = engine.load(tiny(kind), "float32")
    wanted = []
    for prompt in prompts:
        tokens = prompt.tolist()
        for _ in range(8):
            with torch.no_grad():
                logits = model.network(input_ids=torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
        wanted.append(tokens[len(prompt) :])
    sampling = Sampling(max_tokens=8)
    assert columns(list(model.generate(prompts, sampling)), 4) == wanted
    alone = [columns(list(model.generate([p], sampling)), 1)[0] for p in prompts]
    assert alone == wanted


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mistral"])
def test_decode_logits_equal_prefill_logits(kind, tiny, engine, prompts, monkeypatch):
    from pippin.engines.torch import generate

    model, seen = engine.load(tiny(kind), "float32"), []
    forward = generate._Group._forward

    def spy(group):
        seen.append((list(group.rows.numbers), forward(group)))
        return seen[-1][1]

    monkeypatch.setattr(generate._Group, "_forward", spy)
    steps = list(model.generate(prompts, Sampling(max_tokens=7)))
    for row, prompt in enumerate(prompts):
        whole = np.concatenate([prompt, [step[row] for step in steps]])
        with torch.no_grad():
            logits = model.network(torch.tensor(whole[None]).long()).logits[0]
        for number, (rows, decoded) in enumerate(seen):
            wanted = logits[len(prompt) - 1 + number]
            torch.testing.assert_close(decoded[rows.index(row)], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_steps_over_fixed_buffers_give_the_caches_logits(kind, tiny, engine, prompts, monkeypatch):
    """What CUDA records, as plain calls: rows of different lengths, one of which ends early."""
    from pippin.engines.torch import generate
    from pippin.engines.torch.replay import Replay

    model, plain = engine.load(tiny(kind), "float32"), generate._Group._plain
    seen, replays = [], []

    def both(group):
        wanted = plain(group)
        if group.cache.get_seq_length() == 10:
            group.places = {number: place for place, number in enumerate(group.rows.numbers)}
            replays.append(Replay(group.network, group.cache, group.rows.mask_BT, 8))
        if replays:
            seen.append((len(group.rows.numbers), group._replayed(replays[0]), wanted))
        return wanted

    monkeypatch.setattr(generate._Group, "_plain", both)
    free = columns(list(model.generate(prompts, Sampling(max_tokens=6))), 4)
    replays.clear()
    list(model.generate(prompts, Sampling(max_tokens=6, stop=frozenset([free[1][3]]))))
    assert {rows for rows, *_ in seen} >= {4, 3}
    for _, ours, wanted in seen:
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("asked", [{"sliding_window": 4}, {"softcap": 30.0}])
def test_attention_of_another_kind_is_not_recorded(asked):
    from pippin.engines.torch.replay import _attention

    query = torch.zeros(1, 2, 1, 8)
    with pytest.raises(RuntimeError, match="Module cannot be recorded"):
        _attention(torch.nn.Module(), query, query, query, None, replay=object(), **asked)


def test_rows_end_at_stop_tokens_and_the_rest_goes_on(tiny, engine, prompts):
    model = engine.load(tiny("llama"), "float32")
    free = columns(list(model.generate(prompts, Sampling(max_tokens=10))), 4)
    stop = frozenset([free[0][3], free[1][6]])
    steps = list(model.generate(prompts, Sampling(max_tokens=10, stop=stop)))
    for row, tokens in enumerate(free):
        end = next((i for i, token in enumerate(tokens) if token in stop), len(tokens))
        assert [step[row] for step in steps[:end]] == tokens[:end]
        assert all(step[row] is None for step in steps[end:])


def test_it_ends_when_all_rows_have_ended(tiny, engine, prompts):
    model = engine.load(tiny("llama"), "float32")
    everything = frozenset(range(97))
    assert list(model.generate(prompts, Sampling(max_tokens=5, stop=everything))) == []
    assert len(list(model.generate(prompts, Sampling(max_tokens=5)))) == 5
    assert list(model.generate(prompts, Sampling(max_tokens=0))) == []
    assert list(model.generate([], Sampling(max_tokens=5))) == []


def test_sampling_follows_its_seed_whatever_the_batch(tiny, engine, prompts):
    model = engine.load(tiny("llama"), "float32")

    def draw(seed, rows):
        sampling = Sampling(max_tokens=12, temperature=1.0, top_p=0.95, seed=seed)
        return columns(list(model.generate(prompts[:rows], sampling)), rows)

    assert draw(1, 4) == draw(1, 4)
    assert draw(1, 4) != draw(2, 4)
    assert draw(1, 2) == draw(1, 4)[:2]


def test_samples_follow_the_distribution():
    logits = torch.tensor([0.5, 2.0, 1.0, -1.0])
    draws = ((np.arange(4000) + 0.5) / 4000).tolist()
    sampling = Sampling(max_tokens=1, temperature=0.7)
    picked = sample(logits.expand(4000, 4).clone(), draws, sampling)
    wanted = (logits / 0.7).softmax(-1)
    torch.testing.assert_close(picked.bincount(minlength=4) / 4000, wanted, atol=1e-3, rtol=0)


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(1000, 4)
    draws = np.linspace(0, 0.9999, 1000).tolist()
    for top_p, kept in ((0.4, {0}), (0.6, {0, 1}), (0.81, {0, 1, 2}), (1.0, {0, 1, 2, 3})):
        sampling = Sampling(max_tokens=1, temperature=1.0, top_p=top_p)
        assert set(sample(logits, draws, sampling).tolist()) == kept
