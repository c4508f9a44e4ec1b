"""X^T X of every linear equals what hooks see when samples run one by one."""

import numpy as np
import pytest
import torch

from pippin.engines.torch import moments

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
        moments._add_upper(total, part)
    whole, wanted = moments._whole(total), (x.double().T @ x.double()).numpy()
    np.testing.assert_array_equal(whole, whole.T)
    np.testing.assert_allclose(whole, wanted, rtol=1e-4, atol=1e-4)
