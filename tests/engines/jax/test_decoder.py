"""The decoder against transformers in float32, on a tiny random model of every family."""

import json
import shutil

import numpy as np
import pytest
import torch

from pippin.engines import Sampling
from pippin.errors import ModelError

pytestmark = pytest.mark.jax

FAMILIES = (
    "llama",
    "llama_tied",
    "llama_bias",
    "llama_head100",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma",
    "gemma2",
    "gemma3",
)
ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn_scaled": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "beta_fast": 16,
    },
}


@pytest.fixture(scope="module")
def tokens():
    """Longer than any sliding window of the tiny models, and than the old context of a rope."""
    return np.random.default_rng(0).integers(3, 97, (2, 40)).astype(np.int32)


def transformers_logprobs(folder, tokens):
    """(B, T, V) in float64 from transformers' eager attention."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        logits = network(torch.from_numpy(tokens).long()).logits
    return torch.log_softmax(logits.double(), -1).numpy()


def jax_logprobs(engine, folder, tokens):
    top = engine.load(folder, "float32").topk(tokens, 97)
    whole = np.zeros(top.logprobs_BTK.shape)
    np.put_along_axis(whole, top.ids_BTK.astype(int), top.logprobs_BTK, -1)
    return whole


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_equals_transformers(jax_engine, tiny, tokens, kind):
    ours = jax_logprobs(jax_engine, tiny(kind), tokens)
    np.testing.assert_allclose(ours, transformers_logprobs(tiny(kind), tokens), atol=1e-4)


@pytest.mark.parametrize("rope", ROPES)
def test_rope_scalings_equal_transformers(jax_engine, tiny, tokens, tmp_path, rope):
    folder = with_config(
        tiny("llama"), tmp_path, rope_parameters={**ROPES[rope], "rope_theta": 1e4}
    )
    ours = jax_logprobs(jax_engine, folder, tokens)
    np.testing.assert_allclose(ours, transformers_logprobs(folder, tokens), atol=1e-4)
    plain = jax_logprobs(jax_engine, tiny("llama"), tokens)
    assert np.abs(ours - plain).max() > 1e-2, "the scaling changes something"


def with_config(folder, copy, **changes):
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    path = copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return copy


@pytest.mark.parametrize("kind", ["cohere", "mamba2"])
def test_another_family_is_refused_with_what_loads(jax_engine, tiny, kind):
    with pytest.raises(ModelError, match=f"no decoder for {kind}") as caught:
        jax_engine.load(tiny(kind), "float32")
    assert "Gemma 3" in caught.value.hint
    assert "Qwen 3" in caught.value.hint


def test_an_unknown_scaling_is_refused(jax_engine, tiny, tmp_path):
    folder = with_config(
        tiny("llama"),
        tmp_path,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    )
    with pytest.raises(ModelError, match="rope scaling 'dynamic'"):
        jax_engine.load(folder, "float32")


def test_weights_of_another_config_are_refused(jax_engine, tiny, tmp_path):
    folder = with_config(tiny("llama"), tmp_path / "deep", num_hidden_layers=3)
    with pytest.raises(ModelError, match=r"lacks model.layers.2.*9 in all"):
        jax_engine.load(folder, "float32")
    folder = with_config(tiny("llama"), tmp_path / "flat", num_hidden_layers=1)
    with pytest.raises(ModelError, match=r"does not know: model\.layers\.1"):
        jax_engine.load(folder, "float32")
    folder = with_config(tiny("llama"), tmp_path / "tied", tie_word_embeddings=True)
    with pytest.raises(ModelError, match=r"does not know: lm_head\.weight"):
        jax_engine.load(folder, "float32")


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_greedy_tokens_equal_transformers(jax_engine, tiny, kind):
    from transformers import AutoModelForCausalLM

    rng = np.random.default_rng(2)
    prompts = [rng.integers(3, 97, n).astype(np.int32) for n in (3, 11, 7)]
    steps = list(jax_engine.load(tiny(kind), "float32").generate(prompts, Sampling(max_tokens=20)))
    network = AutoModelForCausalLM.from_pretrained(tiny(kind), dtype=torch.float32)
    for row, prompt in enumerate(prompts):
        tokens = torch.from_numpy(prompt[None]).long()
        whole = network.generate(
            tokens, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert [step[row] for step in steps] == whole[0, len(prompt) :].tolist()


def test_a_stop_token_ends_its_row_alone(jax_engine, tiny):
    model = jax_engine.load(tiny("llama"), "float32")
    prompts = [np.array([5, 6, 7], np.int32), np.array([8, 9], np.int32)]
    free = list(model.generate(prompts, Sampling(max_tokens=40)))
    stop = free[18][0]
    assert stop not in [step[1] for step in free]
    ended = list(model.generate(prompts, Sampling(max_tokens=40, stop=frozenset({stop}))))
    first = [step[0] for step in free].index(stop)
    assert [step[0] for step in ended] == [s[0] for s in free[:first]] + [None] * (40 - first)
    assert [step[1] for step in ended] == [step[1] for step in free]


def test_sampling_equals_the_torch_engine(jax_engine, tiny):
    from pippin.engines import load_engine

    sampling = Sampling(max_tokens=24, temperature=0.9, top_p=0.8, seed=5)
    prompts = [np.array([5, 6, 7], np.int32), np.array([8, 9], np.int32)]
    ours, theirs = (
        list(engine.load(tiny("qwen3"), "float32").generate(prompts, sampling))
        for engine in (jax_engine, load_engine("torch", "cpu"))
    )
    assert ours == theirs


def test_prompts_of_like_lengths_are_compiled_once(jax_engine, tiny):
    from pippin.engines.jax import generate

    model = jax_engine.load(tiny("qwen2"), "float32")
    for length in (3, 9, 14, 20):
        list(model.generate([np.arange(4, 4 + length, dtype=np.int32)], Sampling(max_tokens=3)))
        if length == 3:
            before = generate._prefill._cache_size(), generate._decode._cache_size()
    assert (generate._prefill._cache_size(), generate._decode._cache_size()) == before


def test_moments_equal_the_torch_engine(jax_engine, tiny, tokens):
    from pippin.data.batches import Sample, lay_out
    from pippin.engines import load_engine

    scored = np.zeros(9, bool)
    rows = [
        [Sample(tokens=tokens[b, a : a + 9], scored=scored, row=0) for a in (0, 9)] for b in (0, 1)
    ]
    batches = [lay_out(rows, 22)]
    ours, theirs = (
        engine.load(tiny("gemma3"), "float32").input_moments(batches)
        for engine in (jax_engine, load_engine("torch", "cpu"))
    )
    assert ours.keys() == theirs.keys()
    for name, moment in theirs.items():
        np.testing.assert_allclose(ours[name], moment, rtol=1e-3, atol=1e-3 * moment.max())
