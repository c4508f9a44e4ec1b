"""The norms and gated MLPs with their own backward: equal numbers, less kept."""

import pytest
import torch

from pippin.engines.torch.body import hidden_states
from pippin.engines.torch.fused import fuse

pytestmark = pytest.mark.torch

TOKENS = torch.arange(3, 60)[None]


def run(network):
    """Output, gradient of the embeddings, and the bytes autograd kept on the way."""
    kept = {}

    def pack(tensor):
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    embedded = network.get_input_embeddings()(TOKENS).detach().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = network.model(inputs_embeds=embedded, use_cache=False).last_hidden_state
    out.float().pow(2).sum().backward()
    return out.detach(), embedded.grad, sum(kept.values())


@pytest.mark.parametrize("kind", ["llama", "llama_bias", "qwen3", "mistral"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_equal_values_and_gradients_for_less_memory(kind, dtype, tolerance, tiny, engine):
    plain, fused = (engine.load(tiny(kind), dtype).network for _ in range(2))
    replaced = fuse(fused.modules())
    assert any("RMSNorm" in name for name in replaced)
    assert any("MLP" in name for name in replaced)
    wanted, ours = run(plain), run(fused)
    for a, b in zip(ours[:2], wanted[:2], strict=True):
        assert (a - b).abs().max() <= tolerance * b.abs().max()
    assert ours[2] < (0.95 if dtype == "float32" else 0.85) * wanted[2]


def test_trained_norms_are_left_alone(tiny, engine):
    network = engine.load(tiny("llama"), "float32").network.requires_grad_(True)
    assert fuse(network.modules()) == ["LlamaMLP"]


@pytest.mark.parametrize("kind", ["gemma3", "gemma2", "gpt_oss", "mamba2", "cohere"])
def test_other_formulas_are_left_alone_or_equal(kind, tiny, engine):
    plain, fused = (engine.load(tiny(kind), "float32").network for _ in range(2))
    fuse(fused.modules())
    with torch.no_grad():
        wanted, ours = (hidden_states(network, TOKENS) for network in (plain, fused))
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)
