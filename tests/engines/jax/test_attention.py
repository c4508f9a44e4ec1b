"""What cuDNN's kernel is given: masks and padding that leave a row's attention as it is."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pippin.engines.jax import attention
from pippin.engines.jax.architecture import EVERYWHERE
from pippin.engines.jax.fuji import fuji_spec

pytestmark = pytest.mark.jax


@pytest.mark.parametrize("window", [EVERYWHERE, 4])
def test_the_kernels_arguments_mean_the_same_attention(monkeypatch, window):
    """21 tokens, 10 channels, padding at the end; XLA's attention stands for the kernel."""
    kernel = jax.nn.dot_product_attention

    def stand_in(q, *rest, implementation, **options):
        assert implementation == "cudnn"
        assert q.shape[1] % 2 == q.shape[3] % 8 == 0
        return kernel(q, *rest, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    spec, rng = with_heads_of_10(), np.random.default_rng(0)
    segments = np.repeat(np.array([[1, 2, 3, 0]], np.int32), [5, 7, 6, 3], axis=1)
    heads = spec.num_heads, spec.num_kv_heads, spec.num_kv_heads
    sides = [jnp.asarray(rng.normal(size=(1, 21, n, 10)), jnp.float32) for n in heads]
    ours, theirs = (
        attend(spec, jnp.asarray(segments), jnp.int32(window))(*sides)
        for attend in (attention.cudnn_attention, attention.row_attention)
    )
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


def with_heads_of_10():
    return replace(fuji_spec("test"), head_dim=10, num_kv_heads=2, scale=10**-0.5)
