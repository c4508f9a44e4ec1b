"""Tokens drawn on the host are those that PyTorch draws from the same logits."""

import numpy as np
import pytest
import torch

from pippin.engines import Sampling
from pippin.engines.sampling import sample
from pippin.engines.torch import generate


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_the_host_draws_what_torch_draws(temperature, top_p):
    rng = np.random.default_rng(0)
    logits_BV, draws = 3 * rng.standard_normal((500, 40)), rng.random(500).tolist()
    sampling = Sampling(max_tokens=1, temperature=temperature, top_p=top_p)
    wanted = generate.sample(torch.from_numpy(logits_BV), draws, sampling)
    assert sample(logits_BV, draws, sampling) == wanted.tolist()


def test_shares_are_those_of_the_distribution():
    chances = np.array([0.5, 0.3, 0.15, 0.05])
    logits_BV, draws = np.log(chances)[None].repeat(4000, 0), (np.arange(4000) / 4000).tolist()
    picked = sample(logits_BV, draws, Sampling(max_tokens=1, temperature=1.0, top_p=0.7))
    shares = np.bincount(picked, minlength=4) / 4000
    np.testing.assert_allclose(shares, [0.625, 0.375, 0, 0], atol=1e-3)
