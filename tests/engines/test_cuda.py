"""On a CUDA device: the same numbers as on the CPU. Skipped where there is none."""

import numpy as np
import pytest
import torch

from pippin.data.batches import BatchPlan, Sample
from pippin.engines import Sampling, load_engine
from pippin.engines.torch import attention
from pippin.engines.torch.compiled import graphs
from pippin.engines.torch.cpu_attention import Span
from pippin.engines.torch.loss import Head, head_loss
from pippin.engines.torch.rows import packed_rows
from pippin.model.adapter import first_magnitudes
from pippin.model.weights import Checkpoint
from pippin.recipe import Lora, Train

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

KINDS = ["llama", "llama_head100", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss"]


@pytest.fixture(scope="module")
def cuda():
    return load_engine("torch", "cuda")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_loss_equals_the_cpus(kind, dtype, tiny, engine, cuda, samples, pack):
    batch = pack([samples[:3], samples[3:]])
    exact = engine.load(tiny(kind), "float32").trainer(Train(), None, {}, 0).loss(batch)[0]
    trainer = cuda.load(tiny(kind), dtype).trainer(Train(), None, {}, 0)
    assert trainer.ability.layout is packed_rows
    tolerance = 1e-4 if dtype == "float32" else 2e-2
    assert trainer.loss(batch)[0] == pytest.approx(exact, rel=tolerance)


def test_one_kernel_for_all_samples_equals_one_a_sample():
    torch.manual_seed(0)
    shapes = [(1, 4, 40, 100), (1, 2, 40, 100), (1, 2, 40, 100)]
    leaves = [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes]
    bounds, results = (Span(0, 7), Span(7, 8), Span(8, 40)), []
    for offsets in (None, torch.tensor([0, 7, 8, 40], dtype=torch.int32, device="cuda")):
        inputs = [leaf.clone().requires_grad_() for leaf in leaves]
        packing = attention.Packing(bounds=bounds, offsets=offsets)
        for window in (None, 5):
            out, _ = attention.packed_attention(
                torch.nn.Module(), *inputs, None, packing=packing, sliding_window=window
            )
            out.float().pow(2).sum().backward()
            results.append([out.detach(), *(x.grad.clone() for x in inputs)])
            for x in inputs:
                x.grad = None
    for one, many in zip(results[:2], results[2:], strict=True):
        for a, b in zip(one, many, strict=True):
            assert (a - b).abs().max() <= 2e-2 * a.abs().max()


@pytest.mark.parametrize("lora", [Lora(rank=4, dropout=0.2), None])
def test_training_goes_down_and_resumes(lora, tiny, cuda, samples, pack, adapter):
    def start():
        model = cuda.load(tiny("llama"), "bfloat16")
        return model.trainer(Train(), lora, adapter(model) if lora else {}, 0)

    batch, trainer, resumed = [pack([samples])], start(), start()
    losses = [trainer.step(batch, 1e-2).loss_sum for _ in range(6)]
    assert losses[-1] < losses[0]
    resumed.restore(trainer.state())
    ours, theirs = (t.step(batch, 1e-2).loss_sum for t in (trainer, resumed))
    assert ours == pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_scores_and_tokens_equal_the_cpus(kind, tiny, engine, cuda, samples):
    ours, exact = (e.load(tiny(kind), "float32") for e in (cuda, engine))
    tokens = np.stack([samples[4], samples[4][::-1]])
    np.testing.assert_allclose(ours.logprobs(tokens), exact.logprobs(tokens), atol=1e-3)
    sampling = Sampling(max_tokens=5)
    assert list(ours.generate(samples, sampling)) == list(exact.generate(samples, sampling))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_recorded_steps_say_what_plain_ones_do(kind, tiny, cuda, samples, monkeypatch):
    from pippin.engines.torch import generate

    model, recorded = cuda.load(tiny(kind), "float32"), []
    find = generate._Group._recorded
    monkeypatch.setattr(
        generate._Group, "_recorded", lambda *a: recorded.append(find(*a)) or recorded[-1]
    )
    sampling = Sampling(max_tokens=12, stop=frozenset(range(3, 20)))
    ours = list(model.generate(samples, sampling))
    assert (recorded[0] is None) == (kind == "gemma3")  # which has windows
    monkeypatch.setattr(generate._Group, "_recorded", lambda *_: None)
    assert list(model.generate(samples, sampling)) == ours


def test_the_figures_are_the_devices(cuda):
    assert cuda.device().startswith("cuda (")
    assert cuda.dtype("auto") == "bfloat16"
    assert cuda.peak_memory() > 0


@pytest.mark.parametrize("shape", [(4, 4, 100, None), (4, 2, 64, None), (2, 1, 36, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_and_its_gradients_equal_float64s(shape, dtype):
    heads, kv, channels, window = shape
    lengths, generator = [3, 1, 130, 66, 200], torch.Generator("cuda").manual_seed(0)
    edges = np.cumsum([0, *lengths])
    first, last = (
        torch.tensor(np.repeat(x, lengths), dtype=torch.int32, device="cuda")
        for x in (edges[:-1], edges[1:])
    )
    inputs = [
        torch.randn(1, sum(lengths), h, channels, generator=generator, device="cuda").to(dtype)
        for h in (heads, kv, kv, heads)
    ]
    bounds = tuple(map(Span, edges[:-1].tolist(), edges[1:].tolist()))
    assert attention.prepare(torch.device("cuda", 0))
    results = []
    for exact, packing in (
        (False, attention.Packing(bounds=bounds, first_T=first, last_T=last)),
        (True, attention.Packing(bounds=bounds)),
    ):
        leaves = [x.double() if exact else x for x in inputs]
        upstream = leaves.pop()
        leaves = [x.transpose(1, 2).detach().requires_grad_() for x in leaves]
        out, _ = attention.packed_attention(
            torch.nn.Module(), *leaves, None, packing=packing, sliding_window=window
        )
        results.append([out.detach(), *torch.autograd.grad(out, leaves, upstream)])
    for ours, exact in zip(*results, strict=True):
        error = (ours.double() - exact).norm() / exact.norm()
        assert error <= (1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (30.0, 0.5)])
def test_the_loss_and_its_gradient_equal_float64s(softcap, scale):
    generator = torch.Generator("cuda").manual_seed(0)
    hidden, weight = (
        torch.randn(n, 64, generator=generator, device="cuda") / 8 for n in (300, 5000)
    )
    targets = torch.randint(0, 5000, (300,), generator=generator, device="cuda")
    results = []
    for dtype in (torch.float32, torch.float64):
        leaf = hidden.detach().to(dtype, copy=True).requires_grad_()
        head = Head(weight_VD=weight.to(dtype), scale=scale, softcap=softcap)
        loss = head_loss(leaf, targets, head)
        loss.backward()
        results.append((loss.detach(), leaf.grad))
    for ours, exact in zip(*results, strict=True):
        assert (ours - exact).norm() <= 1e-5 * exact.norm()


def test_fifty_losses_in_float32_equal_the_cpus(tiny, engine, cuda, adapter):
    rng, losses = np.random.default_rng(1), []
    samples = [
        Sample(tokens=rng.integers(3, 97, n).astype(np.int32), scored=np.arange(n) > 0, row=row)
        for row, n in enumerate(rng.integers(2, 24, 40))
    ]
    train = Train(row_tokens=48, batch_rows=2)
    plan = BatchPlan(samples, train, seed=0)
    for side in (engine, cuda):
        model = side.load(tiny("llama"), "float32")
        trainer = model.trainer(train, Lora(rank=4), adapter(model), 0)
        results = [trainer.step(plan.batches(step), 3e-3) for step in range(50)]
        losses.append([result.loss_sum / result.tokens for result in results])
    assert trainer.by_hand
    assert losses[0][-1] < 0.98 * losses[0][0]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "llama_head100", "llama_bias", "mistral", "qwen2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_by_hand_give_the_cpus_gradients(
    kind, dtype, tiny, engine, cuda, samples, pack, adapter
):
    batch, states = pack([samples[:3], samples[3:]]), []
    live = dtype == "float32"  # bfloat16 blurs what a strong adapter does to a tiny network
    for side, precision in ((engine, "float32"), (cuda, dtype)):
        model = side.load(tiny(kind), precision)
        trainer = model.trainer(Train(), Lora(rank=4), adapter(model, live=live), 0)
        trainer.step([batch], 1e-3)
        states.append(trainer.state())
    assert trainer.by_hand
    assert trainer.notices == ()
    tolerance = 1e-4 if live else 1e-1
    for name, wanted in states[0].items():
        if name.startswith("exp_avg."):
            assert np.linalg.norm(states[1][name] - wanted) <= tolerance * np.linalg.norm(wanted)


def test_dora_gives_the_cpus_losses(tiny, engine, cuda, samples, pack, adapter):
    losses, lora = [], Lora(rank=4, dora=True)
    for side in (engine, cuda):
        model = side.load(tiny("llama"), "float32")
        weights = adapter(model, live=True)
        linears = {name.rpartition(".lora_")[0] for name in weights}
        weights |= first_magnitudes(Checkpoint(tiny("llama")), linears)
        trainer = model.trainer(Train(), lora, weights, 0)
        losses.append([trainer.step([pack([samples])], 1e-2).loss_sum for _ in range(4)])
    assert trainer.compiled
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_layers_that_drop_inputs_are_compiled(tiny, cuda, adapter):
    model = cuda.load(tiny("llama"), "bfloat16")
    lora = Lora(rank=4, dropout=0.1)
    trainer = model.trainer(Train(row_tokens=64), lora, adapter(model), 0)
    assert trainer.compiled
    assert not trainer.by_hand


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_layers_are_compiled_once(kind, tiny, cuda, samples, pack, adapter):
    model, batch = cuda.load(tiny(kind), "bfloat16"), pack([samples, samples[:3]])
    train = Train(row_tokens=batch.tokens_BT.shape[1], batch_rows=2)
    trainer = model.trainer(train, Lora(rank=4), adapter(model), 0)
    assert trainer.compiled
    assert trainer.notices == ()
    trainer.step([batch], 1e-3)
    count = graphs()
    for rows in ([samples[::-1], samples[2:]], [samples]):  # other lengths, then an empty row
        trainer.step([pack(rows)], 1e-3)
    trainer.loss(pack([samples[:2]]))
    assert graphs() == count


def test_an_update_that_is_not_finite_is_not_made(tiny, cuda, samples, pack, adapter):
    model = cuda.load(tiny("llama"), "bfloat16")
    trainer = model.trainer(Train(), Lora(rank=4), adapter(model, live=True), 0)
    trainer.step([pack([samples])], 1e-3)
    before = trainer.state()
    trainer.head.weight_VD[0, 0] = float("inf")
    assert not np.isfinite(trainer.step([pack([samples])], 1e-3).loss_sum)
    after = trainer.state()
    for name in before.keys() - {"steps"}:
        np.testing.assert_array_equal(after[name], before[name])


@pytest.mark.parametrize("kind", ["llama", "gemma3"])  # by hand and compiled
def test_a_steady_step_never_waits_and_going_ahead_changes_no_number(
    kind, tiny, cuda, samples, pack, adapter
):
    steps, results = [[pack([samples[i:]]), pack([samples[i:3]])] for i in range(3)], []
    for ahead in (True, False):
        model = cuda.load(tiny(kind), "bfloat16")
        train = Train(row_tokens=steps[0][0].tokens_BT.shape[1])
        trainer = model.trainer(train, Lora(rank=4), adapter(model), 0)
        trainer.goes_ahead = ahead
        for step in range(9):
            torch.cuda.set_sync_debug_mode("error" if ahead and step > 3 else "default")
            try:
                told = steps[(step + 1 + (step == 6)) % 3]  # once of others than come
                results.append(trainer.step(steps[step % 3], 1e-2, lambda told=told: told))
            finally:
                torch.cuda.set_sync_debug_mode("default")
    for one, other in zip(results[:9], results[9:], strict=True):
        assert one.loss_sum == pytest.approx(other.loss_sum, rel=1e-3)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="no FP8"
)
@pytest.mark.parametrize("kind", ["llama", "llama_bias"])
def test_frozen_weights_in_float8_train_nearly_alike(kind, tiny, cuda, samples, pack, adapter):
    batch, losses = pack([samples]), {}
    for frozen in ("auto", "float8"):
        model = cuda.load(tiny(kind), "bfloat16")
        train = Train(row_tokens=batch.tokens_BT.shape[1], frozen_dtype=frozen)
        trainer = model.trainer(train, Lora(rank=4), adapter(model), 0)
        losses[frozen] = [trainer.step([batch], 1e-3).loss_sum for _ in range(6)]
        assert trainer.by_hand or trainer.compiled
        assert losses[frozen][-1] < losses[frozen][0]
    assert any("FP8" in notice for notice in trainer.notices)
    assert losses["float8"] == pytest.approx(losses["auto"], rel=5e-2)
    assert losses["float8"] != losses["auto"]
