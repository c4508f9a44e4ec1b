"""Training on beginnings that stand once: the numbers of every sample by itself."""

import numpy as np
import pytest
import torch
import transformers

from pippin.data.batches import Sample, lay_out, without_unread
from pippin.data.beginnings import share_beginnings
from pippin.engines.torch import cpu_kernels, probe
from pippin.recipe import Lora, Train

pytestmark = pytest.mark.torch

PROMPTS, TAILS = (14, 12), ((3, 6, 2, 9), (5, 4))
LORA = Lora(rank=4, alpha=8)


@pytest.fixture(scope="module")
def alike() -> list[Sample]:
    """Six samples on two prompts and one by itself; what follows a prompt is scored."""
    rng, made = np.random.default_rng(1), []
    for prompt, tails in zip(PROMPTS, TAILS, strict=True):
        head = rng.integers(3, 97, prompt)
        made += [np.concatenate([head, rng.integers(3, 97, tail)]) for tail in tails]
    made.append(rng.integers(3, 97, 20))
    starts = [n for n, tails in zip(PROMPTS, TAILS, strict=True) for _ in tails] + [3]
    samples = [
        Sample(tokens=tokens.astype(np.int32), scored=np.arange(len(tokens)) >= start, row=0)
        for tokens, start in zip(made, starts, strict=True)
    ]
    return [samples[i] for i in (4, 0, 6, 2, 5, 1, 3)]


@pytest.fixture(scope="module")
def batch(alike):
    return lay_out([alike[:3], alike[3:]], 90)


def one_by_one(network, samples):
    """Summed loss and gradients of transformers' own forward, a sample at a time."""
    total = 0.0
    for sample in samples:
        tokens, scored = torch.from_numpy(sample.tokens).long(), torch.from_numpy(sample.scored)
        logits = network(input_ids=tokens[None], use_cache=False).logits[0]
        loss = torch.nn.functional.cross_entropy(
            logits[:-1][scored[1:]], tokens[1:][scored[1:]], reduction="sum"
        )
        loss.backward()
        total += loss.item()
    named = network.named_parameters()
    return total, {name: p.grad for name, p in named if p.grad is not None}


def near(ours, wanted, tolerance):
    for name, one in wanted.items():
        assert (ours[name] - one).norm() <= tolerance * max(one.norm(), 1e-6), name


def test_beginnings_stand_once(batch):
    read = without_unread(batch)
    # What predicts the first scored token is its left neighbour: not shared.
    assert read.real_tokens - share_beginnings(read).real_tokens == 3 * 13 + 11


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),  # transformers' norms and angles are float32 throughout
    [
        ("llama", "float64", 5e-7),
        ("qwen3", "float64", 5e-7),
        ("gemma3", "float64", 5e-7),  # a window of 4 tokens, which ends inside the beginnings
        ("gemma2", "float32", 1e-5),  # soft caps
        ("gpt_oss", "float32", 1e-5),  # sinks
    ],
)
def test_every_weights_gradient_is_transformers(kind, dtype, tolerance, tiny, engine, alike, batch):
    network = transformers.AutoModelForCausalLM.from_pretrained(
        tiny(kind), dtype=getattr(torch, dtype)
    )
    wanted, grads = one_by_one(network, alike)
    trainer = engine.load(tiny(kind), dtype).trainer(Train(method="full"), None, {}, 0)
    assert trainer.ability.shares
    assert trainer._backward(batch).item() == pytest.approx(wanted, rel=tolerance)
    near({name: p.grad for name, p in trainer.network.named_parameters()}, grads, tolerance)


@pytest.mark.skipif(cpu_kernels.missing() is not None, reason=str(cpu_kernels.missing()))
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_layers_by_hand_train_as_pefts(kind, checkpointing, tiny, engine, adapter, alike, batch):
    peft = pytest.importorskip("peft")
    model = engine.load(tiny(kind), "float32")
    weights = adapter(model, live=True)
    network = transformers.AutoModelForCausalLM.from_pretrained(tiny(kind), dtype=torch.float32)
    names = sorted({key.split(".lora_")[0].rpartition(".")[2] for key in weights})
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=names)
    theirs = peft.get_peft_model(network, settings)
    pairs = {}
    for name, parameter in theirs.named_parameters():
        key = name.removeprefix("base_model.model.").replace(".default.", ".")
        if key in weights:
            parameter.data, pairs[name] = torch.from_numpy(weights[key]), key
    wanted, grads = one_by_one(theirs, alike)
    train = Train(gradient_checkpointing=checkpointing)
    trainer = model.trainer(train, LORA, weights, 0)
    assert trainer.by_hand
    assert trainer._backward(batch).item() == pytest.approx(wanted, rel=1e-5)
    found = {name: p.grad for name, p in trainer.trainable.items()}
    near(found, {pairs[name]: grad for name, grad in grads.items()}, 2e-5)


@pytest.mark.parametrize(
    ("lora", "dtype"),
    [(Lora(rank=4, dora=True), "float32"), (LORA, "bfloat16"), (None, "float32")],
)
def test_going_on_after_a_stop_changes_nothing(lora, dtype, tiny, engine, adapter, alike, batch):
    def start():
        model = engine.load(tiny("llama"), dtype)
        weights = adapter(model, live=True) if lora else {}
        return model.trainer(Train(method="lora" if lora else "full"), lora, weights, 0)

    steps = [[batch], [lay_out([alike[:2]], 50), lay_out([alike[2:]], 99)], [batch]]
    whole, first, second = start(), start(), start()
    straight = [whole.step(step, 1e-2) for step in steps]
    parted = [first.step(steps[0], 1e-2)]
    second.restore({name: array.copy() for name, array in first.state().items()})
    assert parted + [second.step(step, 1e-2) for step in steps[1:]] == straight
    for name, array in whole.state().items():
        np.testing.assert_array_equal(second.state()[name], array)


def test_shared_tokens_share_no_draw(tiny, engine, adapter):
    model = engine.load(tiny("llama"), "float32")
    lora = Lora(rank=4, dropout=0.1)
    assert not model.trainer(Train(), lora, adapter(model), 0).ability.shares


def test_a_network_that_cannot_go_on_from_a_beginning_computes_it_anew(
    tiny, engine, alike, batch, monkeypatch
):
    """Its attention forgets what came before a rest."""
    own = probe.packed_rows

    def forgetful(batch, device):
        rows = own(batch, device)
        packing = rows.extra["packing"]
        packing.bounds = tuple(span._replace(begun=0, parted=0) for span in packing.bounds)
        return rows

    monkeypatch.setattr(probe, "packed_rows", forgetful)
    model = engine.load(tiny("llama"), "float32")
    wanted = one_by_one(model.network.requires_grad_(True), alike)[0]
    trainer = model.trainer(Train(), None, {}, 0)
    assert not trainer.ability.shares
    assert any("computes a beginning anew" in notice for notice in trainer.notices)
    assert trainer._backward(batch).item() == pytest.approx(wanted, rel=1e-5)
