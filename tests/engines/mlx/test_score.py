"""Scores, answers and moments on MLX that PyTorch's parity does not cover."""

from pathlib import Path

import numpy as np
import pytest
from mlx.utils import tree_map

from pippin.engines import Sampling
from pippin.errors import ModelError
from pippin.quantizers.in_turn import outputs_of

pytestmark = pytest.mark.mlx


def test_scores_do_not_depend_on_the_chunk(engine, tiny, monkeypatch):
    tokens = np.random.default_rng(0).integers(3, 97, (4, 30)).astype(np.int32)
    model = engine.load(tiny("llama"), "float32")
    wanted, top = model.logprobs(tokens), model.topk(tokens, 7)
    monkeypatch.setattr("pippin.engines.mlx.body.CHUNK_BYTES", 1)
    np.testing.assert_allclose(model.logprobs(tokens), wanted, atol=1e-6)
    np.testing.assert_array_equal(model.topk(tokens, 7).ids_BTK, top.ids_BTK)


def test_given_ids_alone_and_the_whole_vocabulary(engine, tiny):
    tokens = np.random.default_rng(0).integers(3, 97, (2, 5)).astype(np.int32)
    model = engine.load(tiny("qwen2"), "float32")
    whole = model.topk(tokens, 97)
    asked = np.broadcast_to(np.array([4, 90], np.int32), (2, 5, 2))
    given = model.topk(tokens, 0, asked)
    assert given.ids_BTK.shape == (2, 5, 2)
    for place, token in enumerate((4, 90)):
        wanted = whole.logprobs_BTK[whole.ids_BTK == token].reshape(2, 5)
        np.testing.assert_allclose(given.logprobs_BTK[..., place], wanted, atol=1e-6)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gemma2"])
def test_rows_answer_as_they_do_alone(engine, tiny, kind):
    """Decoded together where the model allows it, in turn where it does not."""
    rng = np.random.default_rng(4)
    lengths, asked = ((3, 1, 2), 1) if kind == "gemma2" else ((3, 11, 7), 9)
    prompts = [rng.integers(3, 97, n).astype(np.int32) for n in lengths]
    model = engine.load(tiny(kind), "float32")
    assert model._decoding.batched == (kind != "gemma2")
    together = list(model.generate(prompts, Sampling(max_tokens=asked)))
    for row, prompt in enumerate(prompts):
        alone = [step[0] for step in model.generate([prompt], Sampling(max_tokens=asked))]
        assert [step[row] for step in together] == alone


def test_no_prompts_no_answers(engine, tiny):
    assert list(engine.load(tiny("llama"), "float32").generate([], Sampling(max_tokens=3))) == []


@pytest.mark.parametrize("kind", ["llama", "llama_bias", "gemma3"])
def test_moments_are_those_of_pytorch(engine, reference, tiny, samples, pack, kind):
    batches = [pack([samples[:3], samples[3:]]), pack([samples[2:]])]
    ours, wanted = (
        e.load(tiny(kind), "float32").input_moments(batches) for e in (engine, reference)
    )
    assert ours.keys() == wanted.keys()
    for name, moment in wanted.items():
        scale = np.abs(moment).max()
        np.testing.assert_allclose(ours[name], moment, atol=1e-5 * scale, err_msg=name)


def test_moments_leave_the_model_as_it_was(engine, tiny, samples, pack):
    model = engine.load(tiny("llama"), "float32")
    before = [type(module) for module in model.network.modules()]
    model.input_moments([pack([samples])])
    assert [type(module) for module in model.network.modules()] == before


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_loss_moments_are_those_of_pytorch(
    engine, reference, tiny, samples, pack, monkeypatch, kind
):
    """With the likeliest token in the place of a drawn one, in both."""
    import mlx.core as mx
    import torch

    from pippin.engines.mlx import fisher
    from pippin.engines.torch import fisher as wanted_fisher

    monkeypatch.setattr(mx.random, "categorical", lambda logits, axis, key: logits.argmax(axis))
    monkeypatch.setattr(torch, "multinomial", lambda p, _, generator: p.argmax(-1, keepdim=True))
    assert fisher.draw(mx.array([[0.0, 2.0]]), mx.random.key(0))[0].item() == 1
    assert wanted_fisher._draw(torch.tensor([[0.0, 2.0]]), torch.Generator())[0].item() == 1
    batches = [pack([samples[:3]]), pack([samples[2:]])]
    ours, wanted = (
        e.load(tiny(kind), "float32").loss_moments(batches) for e in (engine, reference)
    )
    assert ours.keys() == wanted.keys()
    for name, moment in wanted.items():
        scale = np.abs(moment).max()
        np.testing.assert_allclose(ours[name], moment, atol=1e-4 * scale, err_msg=name)


def test_loss_moments_follow_the_seed(engine, tiny, samples, pack):
    model, batches = engine.load(tiny("llama"), "float32"), [pack([samples])]
    linear = "model.layers.0.mlp.up_proj"
    asked = {linear, "no.such.linear"}
    one, same, other = (model.loss_moments(batches, asked, seed) for seed in (1, 1, 2))
    assert one.keys() == {linear, outputs_of(linear)}
    for name in one:
        np.testing.assert_array_equal(one[name], same[name])
        assert not np.array_equal(one[name], other[name])


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_cache_answers_as_in_mlx_lm(bits):
    """Of heads wide enough for a group; 4 bits change an answer."""
    import mlx.core as mx
    from mlx_lm.models import llama
    from mlx_lm.models.cache import make_prompt_cache

    from pippin.engines.mlx.body import Loaded
    from pippin.engines.mlx.engine import MlxModel

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    rest = {"num_hidden_layers": 2, "vocab_size": 97, "rms_norm_eps": 1e-5}
    mx.random.seed(0)
    network = llama.Model(llama.ModelArgs(model_type="llama", **sizes, **rest))
    network.update(tree_map(lambda w: w * 4.0, network.parameters()))
    model = MlxModel(
        Loaded(network=network, head=None, longest=None, notices=()), Path(), "float32"
    )
    prompts = [np.random.default_rng(4).integers(3, 97, n).astype(np.int32) for n in (30, 3)]
    plain = list(model.generate(prompts, Sampling(max_tokens=20)))
    model.quantize_cache(bits)
    steps = list(model.generate(prompts, Sampling(max_tokens=20)))
    assert bits == 8 or steps != plain
    for row, prompt in enumerate(prompts):
        cache = make_prompt_cache(network)
        wanted = [int(network(mx.array(prompt[None]), cache=cache)[0, -1].argmax())]
        cache = [layer.to_quantized(32, bits) for layer in cache]
        while len(wanted) < 20:
            wanted.append(int(network(mx.array([wanted[-1:]]), cache=cache)[0, -1].argmax()))
        assert [step[row] for step in steps] == wanted


def test_caches_that_cannot_be_quantized(engine, tiny):
    """Those that rotate within a window."""
    with pytest.raises(ModelError, match="keys and values in 4 bits"):
        engine.load(tiny("gemma3"), "float32").quantize_cache(4)
