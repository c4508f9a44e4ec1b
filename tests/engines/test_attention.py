"""Packed, padded and single samples give the same numbers, in every architecture that packs."""

import numpy as np
import pytest
import torch
from tests.engines.faults import Fault
from torch.utils._pytree import tree_map

from pippin.engines import load_engine
from pippin.engines.torch import attention, probe
from pippin.engines.torch.body import hidden_states
from pippin.engines.torch.engine import TorchModel
from pippin.engines.torch.load import load_network
from pippin.engines.torch.mps.rules import make_rules
from pippin.engines.torch.mps.simulator import Simulator
from pippin.engines.torch.rows import masked_rows, math_rows, packed_rows
from pippin.errors import ModelError
from pippin.recipe import Train

pytestmark = pytest.mark.torch

SDPA = (
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_attention_math "
    "scaled_dot_product_attention"
)

PACKING = [
    "llama",
    "llama_head100",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "cohere",
    "granite",
    "gpt_oss",
]


def nan(func, args, kwargs):
    """A kernel that gives no number."""
    return tree_map(
        lambda x: x * torch.nan if isinstance(x, torch.Tensor) else x, func(*args, **kwargs)
    )


def single_losses(network, samples):
    """Each sample through the network's own forward with its own attention, in float64 sums."""
    out = []
    for sample in samples:
        tokens = torch.tensor(sample[None].astype(np.int64))
        with torch.no_grad():
            logits = network(input_ids=tokens, use_cache=False).logits[0, :-1].double()
        out.append(torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum").item())
    return out


@pytest.mark.parametrize("kind", PACKING)
def test_packed_equals_padded_equals_single(kind, tiny, engine, samples, pack):
    model = engine.load(tiny(kind), "float32")
    alone = single_losses(model.network, samples)
    trainer = model.trainer(Train(), None, {}, 0)
    assert trainer.ability.packs
    assert trainer.ability.layout is packed_rows
    assert trainer.notices == ()
    packed = trainer.loss(pack([samples[:3], samples[3:]]))[0]
    padded = trainer.loss(pack([[sample] for sample in samples]))[0]
    one_by_one = [trainer.loss(pack([[sample]]))[0] for sample in samples]
    assert packed == pytest.approx(sum(alone), rel=3e-6)
    assert padded == pytest.approx(sum(alone), rel=3e-6)
    np.testing.assert_allclose(one_by_one, alone, rtol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_plain_products_give_the_same_numbers_without_a_fused_kernel(kind, tiny, samples, pack):
    """The way round a device whose kernels are wrong: forward, backward and answers."""
    fused, math = (
        load_engine("torch", "cpu", attention=way).load(tiny(kind), "float32")
        for way in ("auto", "math")
    )
    tokens = samples[2][None]
    with Fault(SDPA, nan):
        scored = math.logprobs(tokens)
        trainer = math.trainer(Train(), None, {}, 0)
        assert trainer.ability.layout is math_rows
        step = trainer.step([pack([samples[:3], samples[3:]])], 1e-3)
    np.testing.assert_allclose(scored, fused.logprobs(tokens), atol=1e-5)
    wanted = fused.trainer(Train(), None, {}, 0).step([pack([samples[:3], samples[3:]])], 1e-3)
    assert step.loss_sum == pytest.approx(wanted.loss_sum, rel=1e-5)
    assert step.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3", "mistral"])
def test_hidden_states_in_float64(kind, tiny, engine, samples, pack):
    network = engine.load(tiny(kind), "float64").network
    batch = pack([samples])
    with torch.no_grad():
        alone = [hidden_states(network, torch.tensor(s[None]).long())[0] for s in samples]
        attention.register()
        network.set_attn_implementation(attention.NAME)
        rows = packed_rows(batch, network.device)
        packed = hidden_states(network, rows.tokens_BT, **rows.extra)[0]
    torch.testing.assert_close(
        packed, torch.cat(alone), rtol=1e-5, atol=1e-5
    )  # eager softmax is float32


def test_packed_gradients_equal_those_of_plain_attention_in_float64(tiny, engine, samples, pack):
    grads = []
    for layout in (packed_rows, masked_rows):
        network = engine.load(tiny("llama"), "float64").network.requires_grad_(True)
        if layout is packed_rows:
            network.set_attn_implementation(attention.NAME)
        rows = layout(pack([samples[:3], samples[3:]]), network.device)
        hidden_states(network, rows.tokens_BT, **rows.extra).pow(3).sum().backward()
        grads.append({n: p.grad for n, p in network.model.named_parameters()})
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], rtol=1e-9, atol=1e-9)


def test_short_bfloat16_samples_are_attended_in_float32():
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 4, 12, 8), (1, 2, 12, 8), (1, 2, 12, 8)]
    q, k, v = (torch.randn(s, generator=generator).bfloat16() for s in shapes)
    packing = attention.Packing(bounds=(attention.Span(0, 5), attention.Span(5, 12)))
    out, _ = attention.packed_attention(torch.nn.Module(), q, k, v, None, packing=packing)
    exact = [
        torch.nn.functional.scaled_dot_product_attention(
            *(span.own(x).double() for x in (q, k, v)), is_causal=True, enable_gqa=True
        )
        for span in packing.bounds
    ]
    wanted = torch.cat(exact, 2).transpose(1, 2)
    assert (out.double() - wanted).abs().max() <= 2**-8 * wanted.abs().max()


def test_padding_never_enters(tiny, engine, samples, pack):
    trainer = engine.load(tiny("llama"), "float32").trainer(Train(), None, {}, 0)
    batch = pack([samples[:2]])
    before = trainer.loss(batch)
    batch.tokens_BT[batch.segments_BT == 0] = 50
    assert trainer.loss(batch) == before


def test_a_recurrent_model_is_not_packed(tiny, engine, samples, pack):
    model = engine.load(tiny("mamba2"), "float32")
    with pytest.raises(ModelError, match="Mamba2ForCausalLM cannot keep packed samples apart") as e:
        model.trainer(Train(), None, {}, 0)
    assert "train.packing = false" in e.value.hint
    alone = single_losses(model.network, samples)
    trainer = model.trainer(Train(packing=False), None, {}, 0)
    padded = trainer.loss(pack([[sample] for sample in samples]))[0]
    assert padded == pytest.approx(sum(alone), rel=1e-5)


def test_a_leaking_attention_is_found(tiny, engine, monkeypatch):
    """The probe must fail when samples see each other: else it proves nothing."""
    network = engine.load(tiny("llama"), "float32").network

    def leaking(module, q, k, v, mask, packing=None, scaling=None, **_):
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None

    monkeypatch.setattr(attention, "packed_attention", leaking)
    ability = probe.find_ability(network)
    monkeypatch.undo()
    attention.register()
    assert ability.layout is masked_rows
    assert "block mask" in ability.notice


def test_a_window_the_layers_do_not_tell_of_limits_the_samples(tiny, engine, samples, pack):
    model = engine.load(tiny("llama"), "float32")
    model.network.config.sliding_window = 6
    trainer = model.trainer(Train(), None, {}, 0)
    trainer.loss(pack([samples[:1]]))
    with pytest.raises(ModelError, match="11 tokens exceeds the attention window of 6"):
        trainer.loss(pack([samples[4:5]]))


@pytest.mark.parametrize("bucket", [4, 16, 64])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (None, 2.0)])
def test_samples_in_buckets_are_the_samples(bucket, window, softcap):
    """As on MPS: lengths are multiples of a bucket, numbers and gradients are the same."""
    generator = torch.Generator().manual_seed(0)
    bounds = ((0, 9), (9, 12), (12, 40))
    rule = attention.Rule(scale=0.3, dropout=0.0, window=window, softcap=softcap, sinks_H=None)
    attend = attention._fused if rule.plain else attention.spelled_out
    lengths, outs, grads = set(), [], []
    for size in (1, bucket):
        drawn = [torch.randn(1, h, 40, 8, generator=generator.manual_seed(h)) for h in (4, 2, 2)]
        leaves = [x.double().requires_grad_() for x in drawn]
        parts = []
        for a, b in bounds:
            cut = [attention._part(x, a, b, size) for x in leaves]
            lengths |= {x.shape[2] % size for x in cut}
            parts.append(attend(*cut, rule)[:, :, : b - a])
        outs.append(torch.cat(parts, 2))
        grads.append(torch.autograd.grad(outs[-1].square().sum(), leaves))
    assert lengths == {0}
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-12, atol=1e-12)
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)


def test_on_mps_few_lengths_are_met(tiny, monkeypatch, pack, samples):
    """The engine's own step on a simulated MPS device."""
    met, own = set(), attention._fused
    monkeypatch.setattr(
        attention, "_fused", lambda q, k, v, rule: met.add(q.shape[2]) or own(q, k, v, rule)
    )
    with Simulator(make_rules(), strict=True):
        network = load_network(tiny("llama"), torch.float32, torch.device("cpu")).to("mps")
        trainer = TorchModel(network, tiny("llama")).trainer(Train(method="full"), None, {}, 0)
        trainer.loss(pack([samples[:3], samples[3:]]))
    assert {length for length in met if length > 2} == {attention.BUCKET}
