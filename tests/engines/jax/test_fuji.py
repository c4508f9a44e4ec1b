"""Fuji's names and its rope over neighbouring channels, against transformers; the run by size."""

import numpy as np
import pytest
import torch

from pippin.engines.jax.fuji import SIZES, fuji_params, fuji_spec, fuji_to_hf, hf_to_fuji
from pippin.errors import UsageError

pytestmark = pytest.mark.jax


@pytest.mark.parametrize("version", ["V1", "V3"])
def test_a_fuji_checkpoint_equals_the_llama_it_came_from(version):
    """Fused and grouped projections; transformers' logits from Fuji's tensors."""
    from pippin.engines.jax.fuji_run import _logits

    spec = fuji_spec(f"test-{version}")
    network = llama(spec)
    hf = {n: t.detach().numpy() for n, t in network.state_dict().items() if n != "lm_head.weight"}
    fuji = hf_to_fuji(spec, hf)
    assert any(n.endswith("i_proj/qkv_proj/weight") for n in fuji)
    back = fuji_to_hf(spec, fuji)
    assert back.keys() == hf.keys()
    for name, array in hf.items():
        np.testing.assert_array_equal(back[name], array, err_msg=name)
    tokens = np.random.default_rng(0).integers(0, spec.vocab_size, 24).astype(np.int32)
    with torch.no_grad():
        wanted = network(torch.from_numpy(tokens[None]).long()).logits[0].numpy()
    found = _logits(spec, fuji_params(spec, fuji), tokens)
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def llama(spec):
    """The same shape in transformers, random."""
    from transformers import LlamaConfig, LlamaForCausalLM

    figures = {
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "rms_norm_eps": spec.eps,
        "rope_theta": 5e5 if spec.num_kv_heads < spec.num_heads else 1e4,
    }
    names = ("hidden_size", "intermediate_size", "vocab_size", "head_dim")
    config = LlamaConfig(
        **figures,
        **{name: getattr(spec, name) for name in names},
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("name", "billions"),
    [("1B", 1.24), ("3B", 3.23), ("7B", 6.61), ("8B", 8.05), ("70B-V3", 70.6), ("405B", 405.9)],
)
def test_published_shapes_have_their_size(name, billions):
    """Counted by shape alone: no array is made."""
    import math

    from pippin.engines.jax.load import names

    count = sum(math.prod(shape) for _, shape in names(fuji_spec(name)))
    assert count / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize("name", ["7B", "70B-V3"])
def test_large_shapes_are_evaluated_abstractly(name):
    import jax

    from pippin.engines.jax import decoder
    from pippin.engines.jax.load import top_shapes

    spec = fuji_spec(name)

    def shaped(shape):
        return jax.ShapeDtypeStruct(shape, "bfloat16")

    layers = {n: shaped((spec.num_layers, *s)) for n, s in spec.shapes().items()}
    params = {**{n: shaped(s) for n, s in top_shapes(spec).items()}, "layers": layers}

    def forward(params, tokens_BT):
        rows = decoder.Rows(tokens_BT, tokens_BT, tokens_BT)
        hidden = decoder.hidden_states(spec, decoder.Net(params, {}), rows)
        return decoder.logits(spec, decoder.head_weight(params), hidden)

    out = jax.eval_shape(forward, params, jax.ShapeDtypeStruct((2, 64), "int32"))
    assert (out.shape, str(out.dtype)) == ((2, 64, spec.vocab_size), "float32")


def test_the_run_compares_device_and_cpu():
    from pippin.engines.jax.fuji_run import run_fuji

    exact = run_fuji("test", 6, "cpu", "float32")
    assert len(exact.tokens) == 6
    assert exact.agreement == exact.tokens_equal == exact.loop_equal == 1.0
    assert exact.difference < 1e-4
    half = run_fuji("test", 6, "cpu")
    assert half.dtype == "bfloat16"
    assert 1e-3 < half.difference < 0.2 * half.spread


def test_an_unknown_size_is_refused():
    with pytest.raises(UsageError, match="no Fuji 9B"):
        fuji_spec("9B")
    with pytest.raises(UsageError, match="no Fuji 8B-V1"):
        fuji_spec("8B-V1")
    assert set(SIZES) > {"1B", "3B", "7B", "8B", "70B", "405B"}
