"""Training in JAX beside the torch engine: equal losses, one compilation, packing, full tuning."""

import numpy as np
import pytest
from tests.targets.tiny_quantized import write_folder

from pippin.data.batches import Batch, Sample, lay_out
from pippin.engines import load_engine
from pippin.errors import ModelError, UsageError
from pippin.quantizers import Grid
from pippin.recipe import Lora, Train

pytestmark = pytest.mark.jax

LORA = Lora(rank=4, alpha=8)
LINEARS = [f"self_attn.{x}_proj" for x in "qkvo"] + [
    f"mlp.{x}_proj" for x in ("gate", "up", "down")
]
ROW = 160  # more than one block of queries, so that attention takes both of its ways


@pytest.fixture(scope="module")
def torch_engine():
    import torch

    torch.set_num_threads(1)
    return load_engine("torch", "cpu")


def packed(lengths, seed=0, rows=1) -> Batch:
    """Samples of these lengths in each row of ROW tokens."""
    rng = np.random.default_rng(seed)

    def sample(length):
        scored = rng.random(length) < 0.8
        scored[0], scored[-1] = False, True
        return Sample(tokens=rng.integers(3, 97, length).astype(np.int32), scored=scored, row=0)

    return lay_out([[sample(n) for n in lengths] for _ in range(rows)], ROW)


def first_adapter(folder, lora=LORA):
    from pippin.model.adapter import adapted_linears, new_adapter
    from pippin.model.weights import Checkpoint

    return new_adapter(adapted_linears(Checkpoint(folder), lora), lora, seed=3)


def trained(engine, folder, train, lora=LORA, seed=0):
    weights = first_adapter(folder, lora) if lora else {}
    return engine.load(folder, "float32").trainer(train, lora, weights, seed)


@pytest.mark.parametrize(
    ("kind", "other"),
    [("llama", "torch"), ("gemma3", "torch"), ("qwen2", "torch"), ("qwen3", "mlx")],
)
def test_losses_equal_the_other_engines_over_50_steps(jax_engine, tiny, kind, other):
    """Packed rows, two micro-batches, clipping, decay; and the step is compiled once."""
    from pippin.engines.jax.trainer import train_step

    pytest.importorskip({"torch": "torch", "mlx": "mlx.core"}[other])
    train = Train(row_tokens=ROW, accumulate=2, weight_decay=0.01)
    engines = jax_engine, load_engine(other, "cpu")
    ours, theirs = (trained(engine, tiny(kind), train) for engine in engines)
    before, results = train_step._cache_size(), []
    for step in range(50):
        lengths = [(140, 15), (30, 60, 40, 20), (9, 9)][step % 3], [(150,), (80, 70)][step % 2]
        batches = [packed(lengths[0], step % 3), packed(lengths[1], 9 + step % 2)]
        batches = batches if step % 7 else batches[:1]
        rate = 5e-3 * (1 - step / 50)
        results.append([trainer.step(batches, rate) for trainer in (ours, theirs)])
    assert train_step._cache_size() == before + 1
    for a, b in results:
        assert a.tokens == b.tokens
        assert a.loss_sum / a.tokens == pytest.approx(b.loss_sum / b.tokens, abs=1e-4)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=2e-3)
    means = [a.loss_sum / a.tokens for a, _ in results]
    assert np.mean(means[-6:]) < 0.95 * np.mean(means[:6])
    mine, other = ours.weights(), theirs.weights()
    assert mine.keys() == other.keys()
    for name, array in other.items():
        np.testing.assert_allclose(mine[name], array, atol=2e-3, err_msg=name)


def test_full_tuning_equals_the_torch_engine(jax_engine, torch_engine, tiny):
    train = Train(row_tokens=ROW, weight_decay=0.1, max_grad_norm=0.5)
    folder = tiny("llama_tied")
    ours, theirs = (trained(e, folder, train, None) for e in (jax_engine, torch_engine))
    for step in range(4):
        batch = packed((60, 90), step)
        a, b = (trainer.step([batch], 1e-3) for trainer in (ours, theirs))
        assert a.loss_sum == pytest.approx(b.loss_sum, rel=1e-5)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-4)
    mine, other = ours.weights(), theirs.weights()
    assert mine.keys() == other.keys()
    for name, array in other.items():
        np.testing.assert_allclose(mine[name], array, atol=5e-5, err_msg=name)


def test_checkpointing_changes_memory_not_numbers(jax_engine, tiny):
    import jax

    batch = packed((60, 90))
    plain, spared = (
        trained(jax_engine, tiny("llama"), Train(row_tokens=ROW, gradient_checkpointing=on))
        for on in (False, True)
    )
    given = jax.tree.leaves(plain.masters)
    a, b = (trainer.step([batch], 1e-2) for trainer in (plain, spared))
    assert all(array.is_deleted() for array in given), "an update overwrites what it was given"
    assert a.loss_sum == pytest.approx(b.loss_sum, rel=1e-6)
    assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-5)


def test_dropout_drops_and_differs_by_step_and_seed(jax_engine, tiny):
    lora, train, batch = Lora(rank=4, dropout=0.5), Train(row_tokens=ROW), packed((60, 90))
    one, other = (trained(jax_engine, tiny("llama"), train, lora, seed) for seed in (0, 1))
    assert one.step([batch], 1e-2).loss_sum == other.step([batch], 1e-2).loss_sum  # B is zero
    assert one.step([batch], 1e-2).loss_sum != other.step([batch], 1e-2).loss_sum
    assert len({one.step([batch], 0.0).loss_sum for _ in range(3)}) == 3
    assert one.loss(batch) == one.loss(batch)


def test_full_tuning_resumes_bit_for_bit(jax_engine, tiny):
    train, batches = Train(row_tokens=ROW), [packed((60, 90))]
    straight, broken, resumed = (trained(jax_engine, tiny("llama"), train, None) for _ in range(3))
    results = [straight.step(batches, 1e-2) for _ in range(4)]
    again = [broken.step(batches, 1e-2) for _ in range(2)]
    resumed.restore(broken.state())
    again += [resumed.step(batches, 1e-2) for _ in range(2)]
    assert again == results
    for name, array in straight.state().items():
        np.testing.assert_array_equal(resumed.state()[name], array, err_msg=name)


def test_no_update_where_the_loss_is_not_finite(jax_engine, tiny):
    trainer, batch = trained(jax_engine, tiny("llama"), Train(row_tokens=ROW)), packed((60, 90))
    trainer.step([batch], 1e-2)
    before = trainer.state()
    norm = trainer.frozen.params["norm"]
    trainer.frozen.params["norm"] = norm * float("nan")
    assert not np.isfinite(trainer.step([batch], 1e-2).loss_sum)
    after = trainer.state()
    for name in before.keys() - {"steps"}:
        np.testing.assert_array_equal(after[name], before[name])


def test_an_adapter_of_some_layers_trains_those_alone(jax_engine, torch_engine, tiny):
    lora = Lora(rank=4, alpha=8, targets=("model.layers.1.*",))
    train, batch = Train(row_tokens=ROW, weight_decay=0.1), packed((60, 90))
    ours, theirs = (trained(e, tiny("llama"), train, lora) for e in (jax_engine, torch_engine))
    for _ in range(3):
        a, b = (trainer.step([batch], 1e-2) for trainer in (ours, theirs))
        assert a.loss_sum == pytest.approx(b.loss_sum, rel=1e-5)
    assert ours.weights().keys() == theirs.weights().keys()


def test_dora_equals_the_torch_engine(jax_engine, torch_engine, tiny, tmp_path):
    """Layers without a pair keep their outputs; a saved adapter is read with its norms."""
    from pippin.model.adapter import Base, first_magnitudes, save_adapter
    from pippin.model.weights import Checkpoint

    lora, folder = Lora(rank=4, alpha=8, dora=True, targets=("model.layers.1.*",)), tiny("qwen2")
    weights = first_adapter(folder, lora)
    linears = {name.rpartition(".lora_")[0] for name in weights}
    weights |= first_magnitudes(Checkpoint(folder), linears)
    engines, train = (jax_engine, torch_engine), Train(row_tokens=ROW, weight_decay=0.1)
    trainers = [e.load(folder, "float32").trainer(train, lora, weights, 0) for e in engines]
    for step in range(5):
        a, b = (trainer.step([packed((60, 90), step)], 1e-2) for trainer in trainers)
        assert a.loss_sum / a.tokens == pytest.approx(b.loss_sum / b.tokens, abs=1e-4)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-3)
    mine, other = (trainer.weights() for trainer in trainers)
    for name, array in other.items():
        np.testing.assert_allclose(mine[name], array, atol=1e-3, err_msg=name)
    save_adapter(tmp_path, lora, mine, Base(name=str(folder), digest=""))
    tokens = np.random.default_rng(4).integers(3, 97, (2, 30)).astype(np.int32)
    ours, theirs = (e.load(folder, "float32", tmp_path).logprobs(tokens) for e in engines)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_dora_of_zeros_stays_zero():
    """A pruned output has no norm to be divided by."""
    import jax.numpy as jnp

    from pippin.engines.jax.products import Pair, linears

    pair = Pair(jnp.ones((1, 3)), jnp.zeros((2, 1)), jnp.zeros(2))
    project = linears({"up.weight": jnp.zeros((2, 3))}, {"up": pair})
    np.testing.assert_array_equal(project("up", jnp.ones((1, 3))), jnp.zeros((1, 2)))


def test_what_is_not_there_is_refused(jax_engine, tiny):
    with pytest.raises(UsageError, match="float8"):
        trained(jax_engine, tiny("llama"), Train(frozen_dtype="float8"))
    model = jax_engine.load(tiny("llama"), "float32")
    head = {
        "lm_head.lora_A.weight": np.zeros((4, 32), np.float32),
        "lm_head.lora_B.weight": np.zeros((97, 4), np.float32),
    }
    with pytest.raises(ModelError, match="wants lm_head; the engine jax adapts"):
        model.trainer(Train(), LORA, head, 0)


def test_peft_loads_what_was_trained_here(jax_engine, tiny, tmp_path):
    peft = pytest.importorskip("peft")
    import torch
    from transformers import AutoModelForCausalLM

    from pippin.model.adapter import Base, save_adapter

    trainer = trained(jax_engine, tiny("qwen3"), Train(row_tokens=ROW))
    for step in range(3):
        trainer.step([packed((60, 90), step)], 1e-2)
    save_adapter(tmp_path, LORA, trainer.weights(), Base(name=str(tiny("qwen3")), digest=""))
    tokens = np.random.default_rng(4).integers(3, 97, (2, 30)).astype(np.int32)
    base = AutoModelForCausalLM.from_pretrained(tiny("qwen3"), dtype=torch.float32)
    with torch.no_grad():
        logits = peft.PeftModel.from_pretrained(base, tmp_path)(
            torch.from_numpy(tokens).long()
        ).logits
    wanted = torch.log_softmax(logits.double(), -1)[:, :-1].numpy()
    wanted = np.take_along_axis(wanted, tokens[:, 1:, None].astype(int), -1)[..., 0]
    ours = jax_engine.load(tiny("qwen3"), "float32", tmp_path).logprobs(tokens)
    np.testing.assert_allclose(ours, wanted, atol=1e-4)
    plain = jax_engine.load(tiny("qwen3"), "float32").logprobs(tokens)
    assert np.abs(plain - ours).max() > 1e-2


@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_an_adapter_over_codes_equals_the_torch_engine(jax_engine, torch_engine, tmp_path, bits):
    """Torch trains over the dequantized weights; here the layers' codes stay codes."""
    from pippin.engines.jax.products import Codes

    grid = Grid(bits=bits, group_size=32, symmetric=False)
    folder = write_folder(tmp_path, choose=lambda _: grid)
    train = Train(row_tokens=ROW, gradient_checkpointing=bits == 8)
    ours, theirs = (trained(e, folder, train) for e in (jax_engine, torch_engine))
    held = ours.frozen.params["layers"]
    assert all(isinstance(held[f"{linear}.weight"], Codes) for linear in LINEARS)
    for step in range(6):
        a, b = (trainer.step([packed((60, 90), step)], 5e-3) for trainer in (ours, theirs))
        assert a.loss_sum / a.tokens == pytest.approx(b.loss_sum / b.tokens, abs=1e-4)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-3)


@pytest.mark.parametrize("bits", [2, 3, 5, 6])
def test_codes_of_every_width_are_read(bits):
    from pippin.engines.jax.products import Codes, dense
    from pippin.model.quantized import dequantize, pack

    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 2**bits, (5, 96)).astype(np.uint8)
    scales, biases = rng.random((2, 5, 3), np.float32)
    held = Codes(pack(codes, bits), scales, biases)
    found = np.asarray(dense(held, 96, "float32"))
    np.testing.assert_allclose(found, dequantize(codes, scales, biases), rtol=1e-6)


def test_bits_that_differ_by_layer_are_told(jax_engine, torch_engine, tmp_path):
    """Such a linear is dequantized as it loads; for scoring all are."""

    def choose(module):
        return Grid(bits=8 if "layers.1.mlp" in module else 4, group_size=32, symmetric=True)

    folder = write_folder(tmp_path, choose=choose)
    trainer = trained(jax_engine, folder, Train(row_tokens=ROW))
    names = ", ".join(linear for linear in LINEARS if "mlp" in linear)
    why = "as codes are floats or bits differ by layer"
    assert trainer.notices == (f"held in float32, {why}: {names}",)
    tokens = np.random.default_rng(4).integers(3, 60, (2, 30)).astype(np.int32)
    ours, theirs = (e.load(folder, "float32").logprobs(tokens) for e in (jax_engine, torch_engine))
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("lora", [LORA, None])
def test_bfloat16_follows_float32(jax_engine, tiny, lora):
    """Frozen weights are held as bits; masters are float32."""
    from pippin.engines.jax.products import plain

    losses = {}
    for dtype in ("float32", "bfloat16"):
        model = jax_engine.load(tiny("llama"), dtype)
        weights = first_adapter(tiny("llama"), lora) if lora else {}
        trainer = model.trainer(Train(row_tokens=ROW), lora, weights, 0)
        losses[dtype] = [trainer.step([packed((60, 90))], 3e-3).loss_sum for _ in range(6)]
    np.testing.assert_allclose(losses["bfloat16"], losses["float32"], rtol=1e-2)
    assert losses["bfloat16"] != losses["float32"]
    held = jax_engine.load(tiny("llama"), "bfloat16").net.params["layers"]["mlp.up_proj.weight"]
    assert str(plain(held).dtype) == "bfloat16"
