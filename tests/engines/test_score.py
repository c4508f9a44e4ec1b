"""Scores equal transformers' logits; memory does not grow with rows x vocabulary."""

import numpy as np
import pytest
import torch

from pippin.engines.torch import loss

pytestmark = pytest.mark.torch

KINDS = ["llama", "llama_tied", "mistral", "gemma2", "gemma3", "cohere", "granite", "mamba2"]


@pytest.fixture(scope="session")
def tokens_BT():  # noqa: N802
    return np.random.default_rng(2).integers(3, 97, (3, 11)).astype(np.int32)


def reference(tiny, kind, tokens_BT):
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(
        tiny(kind), dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return network(torch.tensor(tokens_BT).long()).logits.log_softmax(-1).numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_equal_transformers(kind, tiny, engine, tokens_BT, monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_BYTES", 1)
    ours = engine.load(tiny(kind), "float32").logprobs(tokens_BT)
    wanted = reference(tiny, kind, tokens_BT)[:, :-1]
    picked = np.take_along_axis(wanted, tokens_BT[:, 1:, None].astype(int), -1)[..., 0]
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, picked, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_topk_equals_transformers(kind, tiny, engine, tokens_BT, monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_BYTES", 1)
    model, wanted = engine.load(tiny(kind), "float32"), reference(tiny, kind, tokens_BT)
    best = model.topk(tokens_BT, 5)
    np.testing.assert_array_equal(best.ids_BTK[..., 0], wanted.argmax(-1))
    np.testing.assert_allclose(best.logprobs_BTK, -np.sort(-wanted, -1)[..., :5], atol=1e-5)
    ids = np.random.default_rng(0).integers(0, 97, (3, 11, 7)).astype(np.int32)
    both, given = model.topk(tokens_BT, 5, ids), model.topk(tokens_BT, 0, ids)
    np.testing.assert_array_equal(both.ids_BTK, np.concatenate([best.ids_BTK, ids], -1))
    np.testing.assert_allclose(both.logprobs_BTK[..., :5], best.logprobs_BTK, atol=1e-6)
    np.testing.assert_array_equal(given.ids_BTK, ids)
    np.testing.assert_allclose(
        given.logprobs_BTK, np.take_along_axis(wanted, ids.astype(int), -1), atol=1e-5
    )


def test_padding_on_the_right_changes_nothing(tiny, engine, tokens_BT):
    model = engine.load(tiny("gemma3"), "float32")
    padded = np.concatenate([tokens_BT, np.zeros((3, 6), np.int32)], 1)
    longer = model.logprobs(padded)[:, : tokens_BT.shape[1] - 1]
    np.testing.assert_allclose(longer, model.logprobs(tokens_BT), atol=1e-5)


def test_a_head_of_its_own_is_scored_through_forward(tiny, engine, tokens_BT):
    model, plain = (engine.load(tiny("llama"), "float32") for _ in range(2))
    model._head = None
    np.testing.assert_allclose(model.logprobs(tokens_BT), plain.logprobs(tokens_BT), atol=1e-6)
    np.testing.assert_array_equal(
        model.topk(tokens_BT, 3).ids_BTK, plain.topk(tokens_BT, 3).ids_BTK
    )
