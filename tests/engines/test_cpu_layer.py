"""Decoder layers by hand on a CPU, and the kernels between their products."""

import itertools

import numpy as np
import pytest
import torch
from torch.nn import functional

from pippin.data.batches import without_unread
from pippin.engines.torch import cpu_kernels as kernels
from pippin.engines.torch import cpu_layer
from pippin.engines.torch import cpu_products as products
from pippin.engines.torch.trainer import TorchTrainer
from pippin.recipe import Lora, Train

pytestmark = pytest.mark.torch
needs_compiler = pytest.mark.skipif(kernels.missing() is not None, reason=str(kernels.missing()))

KINDS = {"float32": (torch.float32, 2e-6), "bfloat16": (torch.bfloat16, 1e-2)}


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def near(ours, wanted, tolerance):
    assert (ours.double() - wanted).norm() <= tolerance * wanted.norm()


def attention(q, k, v, edges, firsts, window, scale):
    """In float64, every query by itself, from (T, heads, C)."""
    outs = []
    for number, (start, stop) in enumerate(itertools.pairwise(edges)):
        first = max(f for f in firsts if f <= number)
        for query in range(start, stop):
            seen = [*range(edges[first], edges[first + 1])] * (first < number)
            seen = [*seen, *range(start, query + 1)][-window:]
            keys, values = (x[seen].repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            weights = (torch.einsum("hc,lhc->hl", q[query], keys) * scale).softmax(-1)
            outs.append(torch.einsum("hl,lhc->hc", weights, values))
    return torch.stack(outs)


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("channels", "window"), [(16, 1000), (20, 1000), (16, 30)])
@pytest.mark.parametrize("firsts", [[0, 1, 2, 3, 4, 5], [0, 2, 5], [0, 5]])
def test_attention_and_its_gradients_are_float64s(kind, channels, window, firsts):
    """Also of rests that go on from a beginning, the first sample of their family."""
    dtype, tolerance = KINDS[kind]
    edges, heads, kv = [0, 1, 18, 55, 57, 148], 6, 2
    shapes = (heads, kv, kv, heads)
    q, k, v, up = (drawn(148, h, channels, seed=s).to(dtype) for s, h in enumerate(shapes))
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    wanted = attention(*exact, edges, firsts, window, 0.3)
    call = kernels.Attention(
        edges=torch.tensor(edges),
        firsts=torch.tensor(firsts),
        heads=heads,
        kv_heads=kv,
        channels=channels,
        window=window,
        scale=0.3,
    )
    flat = [x.flatten(1) for x in (q, k, v)]
    out = torch.empty_like(flat[0])
    call.forward(*flat, out)
    near(out, wanted.detach().flatten(1), tolerance)
    grads = torch.autograd.grad(wanted, exact, up.double())
    for ours, one in zip(call.backward(up.flatten(1), *flat), grads, strict=True):
        near(ours, one.flatten(1), tolerance)


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "depth", "columns"), [(1, 2, 49), (100, 66, 16), (23, 34, 130)])
@pytest.mark.parametrize("own", [True, False])
def test_sums_of_products_are_float64s(kind, rows, depth, columns, own, monkeypatch):
    dtype, tolerance = KINDS[kind]
    monkeypatch.setattr(products, "ours", lambda _: own)  # both ways, whatever the CPU is best at
    shapes = ((rows, depth), (columns, depth), (rows, 6), (6, columns), (rows, columns))
    a, w, z, b, beside = (drawn(*shape, seed=s).to(dtype) for s, shape in enumerate(shapes))
    wanted = (a.double() @ w.double().T + z.double() @ b.double()) * 0.5
    for plus in (None, beside, beside[0]):
        for out in (torch.empty_like(beside), torch.empty(columns, rows).T):
            products.add_products(out, [(a, w.T), (z, b)], plus, 0.5)
            near(out, wanted if plus is None else wanted + plus.double(), tolerance)


@needs_compiler
@pytest.mark.parametrize("wrong", [1.001, float("nan")])
def test_products_that_a_machine_gets_wrong_are_not_used(wrong, monkeypatch, tiny, engine, adapter):
    run = products._run
    monkeypatch.setattr(products, "_faster", lambda _: True)
    assert products.fault.__wrapped__(torch.float32) is None
    monkeypatch.setattr(products, "_run", lambda out, *rest: (run(out, *rest), out.mul_(wrong)))
    monkeypatch.setattr(products, "fault", products.fault.__wrapped__)
    assert not products.ours(torch.float32)
    model = engine.load(tiny("llama"), "float32")
    trainer = model.trainer(Train(), Lora(rank=4), adapter(model), 0)
    assert any("products are PyTorch's" in notice for notice in trainer.notices)


@needs_compiler
def test_sums_of_nothing_are_zeros(monkeypatch):
    monkeypatch.setattr(products, "ours", lambda _: True)
    out = drawn(3, 50).float()
    products.add_products(out, [(torch.empty(3, 0), torch.empty(0, 50))])
    assert not out.any()


@needs_compiler
def test_a_micro_batch_without_scored_tokens_adds_nothing(tiny, engine, samples, pack, adapter):
    found = []
    for more in ([], [pack([samples], unscored=99)]):
        model = engine.load(tiny("llama"), "float32")
        trainer = model.trainer(Train(), Lora(rank=4), adapter(model, live=True), 0)
        result = trainer.step([pack([samples]), *more], 1e-3)
        found.append((result.loss_sum, result.tokens, result.grad_norm))
    assert found[0] == found[1]


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_norm_and_gate_and_rotation_are_float64s(kind):
    dtype, tolerance = KINDS[kind]
    x, up, grad = (drawn(9, 40, seed=seed).mul(3).to(dtype) for seed in range(3))
    weight = drawn(40, seed=4).to(dtype)
    exact = [tensor.double().requires_grad_() for tensor in (x, up)]
    wanted = functional.rms_norm(exact[0], (40,), weight.double(), 1e-5)
    near(kernels.norm(x, weight, 1e-5), wanted.detach(), tolerance)
    (wanted,) = torch.autograd.grad(wanted, exact[:1], grad.double())
    near(kernels.norm_grad(grad, x, up, weight, 1e-5), wanted + up.double(), tolerance)
    wanted = functional.silu(exact[0]) * exact[1]
    near(kernels.gate(x, up), wanted.detach(), tolerance)
    both = torch.autograd.grad(wanted, exact, grad.double())
    wanted = wanted.detach()
    for ours, one in zip(kernels.gate_grad(grad.clone(), x, up), (*both, wanted), strict=True):
        near(ours, one, tolerance)
    angle = drawn(9, 4).repeat(1, 2)  # the first 8 of 20 channels turn
    heads = x.double().view(9, 2, 20)
    turned = torch.cat([-heads[..., 4:8], heads[..., :4]], -1)
    some = heads[..., :8] * angle.cos()[:, None] + turned * angle.sin()[:, None]
    ours = x.clone()
    kernels.rotate(ours, (angle.cos().to(dtype), angle.sin().to(dtype)), 20, 1.0)
    near(ours, torch.cat([some, heads[..., 8:]], -1).flatten(1), tolerance)


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_their_gradients_are_float64s(kind):
    dtype, tolerance = KINDS[kind]
    products, targets = (drawn(7, 131) * 20).to(dtype), torch.arange(7)
    exact = products.double().requires_grad_()
    wanted = functional.cross_entropy(exact * 0.5, targets, reduction="none")
    wanted.sum().backward()
    near(kernels.row_losses(products, targets, 0.5, wanted=True), wanted.detach(), 1e-6)
    near(products, exact.grad, tolerance)


@needs_compiler
def test_what_is_not_a_number_stays_it():
    x = torch.full((1, 16), float("nan"), dtype=torch.bfloat16)
    assert kernels.norm(x, torch.ones_like(x[0]), 1e-5).isnan().all()
    assert kernels.gate(x, x).isnan().all()
    assert kernels.row_losses(x, torch.tensor([3]), 1.0, wanted=False).isnan().all()


def trained(tiny, engine, adapter, batch, kind, dtype, lora):
    model = engine.load(tiny(kind), dtype)
    trainer = model.trainer(Train(), lora, adapter(model, live=dtype == "float32"), 0)
    losses = [trainer.step([batch], 1e-3) for _ in range(3)]
    assert trainer.notices == ()
    return trainer, [result.loss_sum / result.tokens for result in losses]


@needs_compiler
@pytest.mark.parametrize("kind", ["llama", "llama_head100", "llama_bias", "mistral", "qwen2"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 3e-4), ("bfloat16", 0.25)])
def test_layers_give_the_plain_layers_gradients(
    kind, dtype, tolerance, tiny, engine, samples, pack, adapter, monkeypatch
):
    batch = pack([samples[:3], samples[3:]])
    ours, losses = trained(tiny, engine, adapter, batch, kind, dtype, Lora(rank=4))
    monkeypatch.setattr(TorchTrainer, "_replace_layers", lambda _: False)
    plain, wanted = trained(tiny, engine, adapter, batch, kind, dtype, Lora(rank=4))
    assert ours.by_hand
    assert not plain.by_hand
    # Three of Adam's updates: where a gradient is next to nothing they go either way (1.2e-4 seen).
    np.testing.assert_allclose(losses, wanted, rtol=tolerance / 10)
    states = [trainer.state() for trainer in (ours, plain)]
    for name in (n for n in states[1] if n.startswith("exp_avg.")):  # bfloat16 blurs both sides
        mine, one = (state[name] for state in states)
        distance = np.linalg.norm(mine - one)
        assert distance <= tolerance * np.linalg.norm(one), name


@needs_compiler
def test_other_forwards_before_the_backward_spoil_nothing(tiny, engine, samples, pack, adapter):
    def gradients(others):
        model = engine.load(tiny("llama"), "float32")
        trainer = model.trainer(Train(), Lora(rank=4), adapter(model, live=True), 0)
        rows = [trainer.ability.layout(pack([s]), torch.device("cpu")) for s in (samples, [other])]
        loss = trainer._loss(rows[0])
        if others:
            trainer._loss(rows[1]).backward()
            trainer._loss(rows[1])
            trainer.optimizer.drop_gradients()
        loss.backward()
        return [p.grad for p in trainer.trainable.values()]

    other = samples[3][::-1].copy()
    for ours, wanted in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(ours, wanted)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_tokens_that_nobody_reads_change_nothing(kind, tiny, engine, samples, pack, adapter):
    batch = pack([samples[:3], samples[3:]], unscored=3)  # the third sample has two tokens
    batch.scored_BT[0, 4] = False  # the first one's last
    short = without_unread(batch)
    assert batch.real_tokens - short.real_tokens == 2 + 2 + 4
    assert short.scored_tokens == batch.scored_tokens
    model = engine.load(tiny(kind), "float32")
    trainer = model.trainer(Train(), Lora(rank=4), adapter(model, live=True), 0)
    found = []
    for each in (short, batch):
        loss = trainer._loss(trainer.ability.layout(each, torch.device("cpu")))
        found.append([loss, *torch.autograd.grad(loss, list(trainer.trainable.values()))])
    for ours, wanted in zip(*found, strict=True):
        near(ours.detach(), wanted.detach().double(), 1e-5)


@pytest.mark.parametrize(
    ("kind", "lora"),
    [("gemma3", Lora(rank=4)), ("qwen3", Lora(rank=4)), ("llama", Lora(rank=4, dropout=0.1))],
)
def test_other_layers_are_left_alone(kind, lora, tiny, engine, samples, pack, adapter):
    trainer = trained(tiny, engine, adapter, pack([samples]), kind, "float32", lora)[0]
    assert not trainer.by_hand


def test_a_missing_compiler_is_told(tiny, engine, samples, pack, adapter, monkeypatch):
    monkeypatch.setattr(kernels, "missing", lambda: "g++ is not installed")
    model = engine.load(tiny("llama"), "float32")
    trainer = model.trainer(Train(), Lora(rank=4), adapter(model), 0)
    assert not trainer.by_hand
    assert any("g++ is not installed" in notice for notice in trainer.notices)
    assert trainer.step([pack([samples])], 1e-3).loss_sum > 0


@needs_compiler
def test_a_layer_that_differs_is_told(tiny, engine, adapter, monkeypatch):
    monkeypatch.setattr(kernels, "gate", lambda gate, up: gate + up)
    model = engine.load(tiny("llama"), "float32")
    trainer = model.trainer(Train(), Lora(rank=4), adapter(model, live=True), 0)
    assert not trainer.by_hand
    assert any("the output of layer 0 differs by" in notice for notice in trainer.notices)


@needs_compiler
def test_a_last_layer_that_goes_on_with_other_tokens_is_told(tiny, engine, adapter, monkeypatch):
    def read(call, x_TD):
        return x_TD if call.read_S is None else x_TD[call.read_S.roll(1)]

    monkeypatch.setattr(cpu_layer.Call, "read", read)
    model = engine.load(tiny("llama"), "float32")
    trainer = model.trainer(Train(), Lora(rank=4), adapter(model, live=True), 0)
    assert any("the output of layer 1 differs by" in notice for notice in trainer.notices)


@needs_compiler
def test_a_loss_that_differs_is_told_and_not_used(tiny, engine, samples, pack, monkeypatch):
    batch, losses = pack([samples]), []
    make = kernels.row_losses
    for wrong in (1.0, 1.01):
        monkeypatch.setattr(kernels, "row_losses", lambda *a, f=wrong, **k: make(*a, **k) * f)
        trainer = engine.load(tiny("llama"), "float32").trainer(Train(), None, {}, 0)
        losses.append(trainer.loss(batch)[0])
    assert any("the sum of the loss differs by 0.01" in notice for notice in trainer.notices)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
