"""The torch engine scored by us against transformers' own full distributions in float64."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pippin.data.batches import Sample
from pippin.engines import load_engine
from pippin.stages.scoring import Sheet, groups

pytestmark = pytest.mark.torch
VOCAB = 97


def make_model(folder, seed):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    network = LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in network.parameters():
            weight.mul_(3.0)  # a sharper distribution: equal ones would pass for any code
    network.save_pretrained(folder)
    return network.double().eval()


def make_samples():
    rng = np.random.default_rng(0)
    for row in range(7):
        tokens = rng.integers(0, VOCAB, int(rng.integers(4, 20))).astype(np.int32)
        scored = rng.random(len(tokens)) < 0.6
        scored[0], scored[-1] = False, True
        yield Sample(tokens=tokens, scored=scored, row=row)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {name: (root / name, make_model(root / name, seed)) for seed, name in enumerate("pq")}


@pytest.fixture(scope="module")
def samples():
    return list(make_samples())


def score(folder, samples, parent, k, rows=3):
    sheet, model = Sheet(samples, parent, k), load_engine("torch", "cpu").load(folder, "float32")
    for group in groups([len(sample.tokens) for sample in samples], rows):
        sheet.fill(model, group)
    return sheet.scored()


@torch.no_grad()
def full_logprobs(network, samples):
    """Every scored position's whole distribution, (N, V) float64."""
    found = []
    for sample in samples:
        ids = torch.from_numpy(sample.tokens[None].astype(np.int64))
        logp_TV = network(input_ids=ids).logits[0].log_softmax(-1)
        found.append(logp_TV[np.flatnonzero(sample.scored) - 1].numpy())
    return np.concatenate(found)


@pytest.mark.parametrize("k", [VOCAB, 32, 4])
def test_divergence_loss_and_agreement(models, samples, k):
    logp, logq = (full_logprobs(network, samples) for _, network in models.values())
    kl = (np.exp(logp) * (logp - logq)).sum(1).mean()
    targets = np.concatenate([s.tokens[s.scored] for s in samples])
    loss = -logq[np.arange(len(targets)), targets].mean()
    parent = score(models["p"][0], samples, None, k).distribution
    found = score(models["q"][0], samples, parent, k)
    assert found.distribution.loss == pytest.approx(loss, abs=1e-5)
    assert found.top1 == pytest.approx((logp.argmax(1) == logq.argmax(1)).mean())
    if k == VOCAB:
        assert found.kl == pytest.approx(kl, abs=1e-5)
    else:
        assert 0.1 * kl < found.kl < kl


def test_the_own_distribution_is_kept_likeliest_first(models, samples):
    kept = score(models["p"][0], samples, None, 5).distribution
    logp = full_logprobs(models["p"][1], samples)
    np.testing.assert_allclose(kept.logprobs_NK, -np.sort(-logp, axis=1)[:, :5], atol=1e-5)
    np.testing.assert_array_equal(kept.ids_NK[:, 0], logp.argmax(1))


def test_a_model_equals_itself(models, samples):
    parent = score(models["p"][0], samples, None, 16).distribution
    found = score(models["p"][0], samples, parent, 16, rows=1)
    assert found.kl == pytest.approx(0.0, abs=1e-6)
    assert found.top1 == 1.0
