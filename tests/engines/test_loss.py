"""The chunked head and loss equal torch's cross-entropy, gradients included."""

import pytest
import torch
from torch.nn import functional

from pippin.engines.torch import loss as losses
from pippin.engines.torch.body import find_head
from pippin.engines.torch.loss import Head, head_loss
from pippin.recipe import Train

pytestmark = pytest.mark.torch

S, D, V = 37, 12, 53


def reference(hidden, weight, bias, targets, scale, softcap):
    logits = functional.linear(hidden, weight, bias) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    return functional.cross_entropy(logits, targets, reduction="sum")


@pytest.mark.parametrize("softcap", [None, 2.5])
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("biased", [False, True])
def test_loss_and_gradients_equal_cross_entropy(monkeypatch, softcap, scale, biased):
    monkeypatch.setattr(losses, "CHUNK_BYTES", 4 * V * 16)
    monkeypatch.setattr(losses, "BLOCK_BYTES", 4 * V * 5)
    torch.manual_seed(0)
    leaves = [torch.randn(S, D), torch.randn(V, D), torch.randn(V) if biased else None]
    targets = torch.randint(0, V, (S,))
    sides = []
    for ours in (True, False):
        h, w, b = (None if x is None else x.double().requires_grad_() for x in leaves)
        if ours:
            total = head_loss(h, targets, Head(weight_VD=w, bias_V=b, scale=scale, softcap=softcap))
        else:
            total = reference(h, w, b, targets, scale, softcap)
        (total / 7).backward()
        sides.append([total.detach(), *(x.grad for x in (h, w, b) if x is not None)])
    for mine, wanted in zip(*sides, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-10, atol=1e-10)


def test_a_frozen_head_gets_no_gradient():
    hidden = torch.randn(S, D, requires_grad=True)
    weight = torch.randn(V, D)
    head_loss(hidden, torch.zeros(S, dtype=torch.int64), Head(weight_VD=weight)).backward()
    assert weight.grad is None
    assert hidden.grad is not None


def test_a_perfect_prediction_costs_nothing():
    weight = torch.eye(V) * 200
    targets = torch.arange(V)
    assert head_loss(torch.eye(V), targets, Head(weight_VD=weight)).item() == 0.0


def test_huge_logits_stay_finite():
    hidden = torch.full((2, D), 1e4, requires_grad=True)
    total = head_loss(hidden, torch.tensor([0, 1]), Head(weight_VD=torch.ones(V, D)))
    total.backward()
    assert torch.isfinite(total)
    assert torch.isfinite(hidden.grad).all()


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "gemma2", "cohere", "granite"])
def test_the_head_is_recognised(kind, tiny, engine):
    assert find_head(engine.load(tiny(kind), "float32").network) is not None


def test_an_unknown_head_falls_back_to_forward(tiny, engine, samples, pack):
    """A head that does anything else is seen by its numbers; the loss then comes from forward."""
    model = engine.load(tiny("llama"), "float32")
    inner = model.network.lm_head.forward
    model.network.lm_head.forward = lambda x: inner(x).sin() * 3
    trainer = model.trainer(Train(), None, {}, 0)
    assert trainer.head is None
    assert "full logits" in trainer.notices[0]
    result = trainer.step([pack([samples])], 1e-3)
    assert result.loss_sum == pytest.approx(sine_loss(engine, tiny, samples), rel=1e-5)


def sine_loss(engine, tiny, samples):
    network = engine.load(tiny("llama"), "float32").network
    total = 0.0
    for sample in samples:
        tokens = torch.tensor(sample[None]).long()
        with torch.no_grad():
            logits = network(input_ids=tokens).logits[0, :-1].sin() * 3
        total += functional.cross_entropy(logits, tokens[0, 1:], reduction="sum").item()
    return total
