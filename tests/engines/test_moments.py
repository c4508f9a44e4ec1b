"""X^T X of every linear equals what hooks see when samples run one by one."""

import numpy as np
import pytest
import torch

from pippin.engines.torch import moments
from pippin.engines.torch.fisher import Weigher
from pippin.quantizers import in_turn
from pippin.quantizers.in_turn import outputs_of

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_moments_equal_sample_by_sample(kind, tiny, engine, samples, pack):
    model = engine.load(tiny(kind), "float32")
    wanted: dict[str, torch.Tensor] = {}

    def hook(name):
        def before(_, inputs):
            x = inputs[0].reshape(-1, inputs[0].shape[-1]).double()
            wanted[name] = wanted.get(name, 0) + x.T @ x

        return before

    linears = {n: m for n, m in model.network.named_modules() if isinstance(m, torch.nn.Linear)}
    handles = [m.register_forward_pre_hook(hook(n)) for n, m in linears.items()]
    with torch.no_grad():
        for sample in samples:
            model.network(torch.tensor(sample[None]).long())
    for handle in handles:
        handle.remove()
    found = model.input_moments([pack([samples[:2], samples[2:3]]), pack([samples[3:]])])
    assert found.keys() == wanted.keys()
    for name, moment in found.items():
        assert moment.dtype == np.float32
        scale = float(wanted[name].abs().max())
        np.testing.assert_allclose(moment, wanted[name].numpy(), atol=1e-5 * scale)


def test_the_model_still_scores_afterwards(tiny, engine, samples, pack):
    model = engine.load(tiny("llama"), "float32")
    before = model.logprobs(samples[1][None])
    model.input_moments([pack([samples])])
    np.testing.assert_array_equal(model.logprobs(samples[1][None]), before)


def test_strips_of_a_wide_input_add_up():
    x = torch.randn(40, 600, generator=torch.Generator().manual_seed(0))
    total = torch.zeros(600, 600)
    for part in x.split(25):
        moments.add_upper(total, part)
    found, wanted = moments.whole(total), (x.double().T @ x.double()).numpy()
    np.testing.assert_array_equal(found, found.T)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_loss_moments_weigh_tokens_by_their_gradients(kind, tiny, engine, samples, pack):
    """One batch, packed, against every sample by itself in float64 and autograd's own gradients."""
    model = engine.load(tiny(kind), "float32")
    batch = pack([samples[:2], samples[2:4]])
    found = model.loss_moments([batch], seed=7)
    plain = model.input_moments([batch])
    heads = {"lm_head"} & plain.keys()
    assert found.keys() == plain.keys() | {outputs_of(name) for name in plain.keys() - heads}
    drawn = _drawn(model, batch, seed=7)
    inputs, outputs = _observed(model.network.double(), samples[:4], drawn)
    for name in plain:
        x, gradient = torch.cat(inputs[name]), torch.cat(outputs[name])
        square = gradient.square().mean(-1)
        weight = square.sqrt() * square.mean() / square.sqrt().mean()
        _near(found[name], (x.T * weight) @ x)
        if name not in heads:
            share = weight / square.clamp(min=1e-300)  # some have no gradient at all
            _near(found[outputs_of(name)], (gradient.T * share) @ gradient)


def _near(moment, wanted):
    np.testing.assert_allclose(moment, wanted.numpy(), atol=2e-4 * float(wanted.abs().max()))


def test_far_outputs_are_summed_in_spans_of_their_own(monkeypatch):
    monkeypatch.setattr(in_turn, "SPAN", 4)
    weigher, g = Weigher(), torch.randn(20, 10)
    weigher.add_outputs("x", g)
    found, whole = weigher.moments()[outputs_of("x")], (g.T @ g).numpy()
    assert found.shape == (10, 4)
    for span, width in ((slice(0, 4), 4), (slice(4, 8), 4), (slice(8, 10), 2)):
        np.testing.assert_allclose(found[span, :width], whole[span, span], rtol=1e-5, atol=1e-5)


def _drawn(model, batch, seed):
    """The predictions as the engine draws them, from its own hidden states."""
    from pippin.engines.torch import fisher
    from pippin.engines.torch.body import hidden_states

    with model._rows([batch]) as (rows,), torch.no_grad():
        hidden = hidden_states(model.network, rows.tokens_BT, **rows.extra)
        real = hidden.reshape(-1, hidden.shape[-1])[rows.real_N]
        return fisher.drawn_predictions(real, model._head, torch.Generator().manual_seed(seed))[0]


def _observed(network, samples, drawn):
    """Inputs and output gradients by linear, samples one after the other."""
    inputs: dict[str, list[torch.Tensor]] = {}
    outputs: dict[str, list[torch.Tensor]] = {}

    def hook(name):
        def after(_, x, out):
            inputs.setdefault(name, []).append(x[0][0].detach())
            out.register_hook(lambda g: outputs.setdefault(name, []).append(g[0]))

        return after

    linears = {n: m for n, m in network.named_modules() if isinstance(m, torch.nn.Linear)}
    handles = [m.register_forward_hook(hook(n)) for n, m in linears.items()]
    network.get_input_embeddings().register_forward_hook(lambda m, x, out: out.requires_grad_(True))
    for sample, targets in zip(samples, drawn.split([len(s) for s in samples]), strict=True):
        logits = network(torch.tensor(sample[None]).long()).logits[0]
        torch.nn.functional.cross_entropy(logits, targets, reduction="sum").backward()
    for handle in handles:
        handle.remove()
    return inputs, outputs
