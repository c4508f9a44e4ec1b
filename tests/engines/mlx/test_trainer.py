"""The training step on MLX: packing, accumulation, resuming bit for bit, refusals."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.engines.mlx.conftest import LORA, gradients

from pippin.engines.mlx import slots
from pippin.engines.mlx.rows import slotted_rows
from pippin.errors import ModelError
from pippin.model.weights import Checkpoint
from pippin.recipe import Lora, Train

pytestmark = pytest.mark.mlx


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3", "gemma2"])
@pytest.mark.parametrize("lora", [LORA, None])
def test_packed_rows_are_rows_of_their_own(start, samples, pack, kind, lora):
    """Losses and gradients; Gemma 2 computes attention itself and gets a mask."""
    if kind == "gemma2":
        samples = [sample[:4] for sample in samples]  # its window is left out by mlx-lm
    trainer = start(lora=lora, kind=kind, live=True)
    together, alone = [pack([samples])], [pack([[sample]]) for sample in samples]
    assert trainer.loss(together[0])[0] == pytest.approx(
        sum(trainer.loss(batch)[0] for batch in alone), rel=1e-5
    )
    one, many = gradients(trainer, together), gradients(trainer, alone)
    for name, grad in many.items():
        scale = max(np.abs(grad).max(), 1e-3)
        np.testing.assert_allclose(one[name], grad, atol=3e-5 * scale, err_msg=name)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_slots_of_a_gpu_are_rows_of_their_own(start, pack, kind, monkeypatch):
    """Samples around the size of a tile, in few calls, against a call a sample."""
    monkeypatch.setattr(slots, "TILE", 8)
    rng = np.random.default_rng(3)
    lengths = (3, 8, 9, 17, 30, 7, 5, 2)
    batch = pack([[rng.integers(3, 97, n).astype(np.int32) for n in lengths]])
    plain, together = start(kind=kind, live=True), start(kind=kind, live=True)
    together.ability = replace(together.ability, layout=slotted_rows)
    assert together.loss(batch)[0] == pytest.approx(plain.loss(batch)[0], rel=1e-5)
    wanted = gradients(plain, [batch])
    for name, grad in gradients(together, [batch]).items():
        scale = max(np.abs(wanted[name]).max(), 1e-3)
        np.testing.assert_allclose(grad, wanted[name], atol=3e-5 * scale, err_msg=name)
    groups = slotted_rows(batch).packing.slots.groups
    assert groups == ((6, 8), (1, 16), (1, 24), (1, 32))


def test_which_layout_a_model_gets(start):
    told = {kind: " ".join(start(kind=kind).notices) for kind in ("llama", "gemma2")}
    assert "block mask" not in told["llama"]
    assert "gemma2 computes attention itself; a block mask" in told["gemma2"]


def test_a_perfect_predictor_has_no_loss_at_all(start, tiny, tmp_path, pack):
    """Each token's embedding points at the token after it, and nothing else adds to it."""
    for path in tiny("llama").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensor[:] = 0
    embed, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    embed[:], head[:], tensors["model.norm.weight"][:] = 0, 0, 1
    for token in range(31):
        embed[token, token] = 1
        head[token + 1, token] = 100
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    trainer = start(kind=tmp_path)
    batch = pack([[np.arange(3, 20, dtype=np.int32), np.arange(8, 30, dtype=np.int32)]])
    assert trainer.loss(batch) == (0.0, 37)
    assert trainer.grad(trainer.optimizer.masters, trainer._rows(batch))[0].item() == 0.0


def test_only_scored_positions_count(start, samples, pack):
    whole, answers = pack([samples[:2]]), pack([samples[:2]], unscored=3)
    trainer = start()
    assert trainer.loss(answers)[1] == sum(len(s) - 3 for s in samples[:2])
    assert trainer.loss(answers)[0] < trainer.loss(whole)[0]


@pytest.mark.parametrize(("head_chunk", "kernel"), [(1 << 26, False), (1, False), (1, True)])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "cohere"])
def test_the_chunked_loss_is_autograds(start, samples, pack, monkeypatch, kind, head_chunk, kernel):
    """Against MLX's own gradient through the model's own logits; 16 positions are one chunk.

    Where a GPU has a kernel, a CPU has the same function in float32.
    """
    monkeypatch.setattr("pippin.engines.mlx.body.CHUNK_BYTES", head_chunk)
    monkeypatch.setattr("pippin.engines.mlx.loss.has_kernel", lambda: kernel)
    batches = [pack([[sample[:4] for sample in samples]])]
    ours, plain = (start(lora=None, kind=kind) for _ in range(2))
    plain.head = None
    assert ours.loss(batches[0])[0] == pytest.approx(plain.loss(batches[0])[0], rel=1e-5)
    wanted = gradients(plain, batches)
    for name, grad in gradients(ours, batches).items():
        scale = max(np.abs(wanted[name]).max(), 1e-3)
        np.testing.assert_allclose(grad, wanted[name], atol=3e-5 * scale, err_msg=name)


def test_parts_of_a_batch_weigh_by_their_tokens(start, samples, pack):
    parts = [pack([samples[:1]]), pack([samples[1:3]]), pack([samples[3:]])]
    one, three = start().step([pack([samples])], 1e-3), start().step(parts, 1e-3)
    assert one.tokens == three.tokens
    assert one.loss_sum == pytest.approx(three.loss_sum, rel=1e-5)
    assert one.grad_norm == pytest.approx(three.grad_norm, rel=1e-4)


@pytest.mark.parametrize(
    ("train", "lora", "dtype"),
    [
        (Train(), Lora(rank=4, dropout=0.3), "float32"),
        (Train(gradient_checkpointing=True), Lora(rank=4, dropout=0.3), "bfloat16"),
        (Train(weight_decay=0.1), None, "float32"),
    ],
)
def test_n_and_n_steps_equal_two_n_bit_for_bit(start, samples, pack, train, lora, dtype):
    steps = [[pack([samples[i:]]), pack([samples[: i + 1]])] for i in range(4)]
    whole = start(train, lora, dtype)
    straight = [whole.step(batches, 1e-2) for batches in steps]
    first = start(train, lora, dtype)
    resumed = [first.step(batches, 1e-2) for batches in steps[:2]]
    state = {name: array.copy() for name, array in first.state().items()}
    mx.random.seed(123)
    second = start(train, lora, dtype)
    second.restore(state)
    resumed += [second.step(batches, 1e-2) for batches in steps[2:]]
    assert resumed == straight
    for name, array in whole.state().items():
        np.testing.assert_array_equal(second.state()[name], array, err_msg=name)


def test_dropout_drops_and_differs_by_step_and_seed(start, samples, pack):
    lora, batch = Lora(rank=4, dropout=0.5), pack([samples])
    trainer, other = start(lora=lora), start(lora=lora, seed=1)
    assert trainer.step([batch], 1e-2).loss_sum == other.step([batch], 1e-2).loss_sum  # B is zero
    assert trainer.step([batch], 1e-2).loss_sum != other.step([batch], 1e-2).loss_sum
    assert len({trainer.step([batch], 0.0).loss_sum for _ in range(3)}) == 3
    assert trainer.loss(batch) == trainer.loss(batch)


@pytest.mark.parametrize("lora", [Lora(rank=4, dropout=0.3), None])
def test_checkpointing_changes_memory_not_numbers(start, samples, pack, lora):
    batch = [pack([samples])]
    plain, recomputed = (start(Train(gradient_checkpointing=on), lora) for on in (False, True))
    for _ in range(2):
        ours, wanted = recomputed.step(batch, 1e-2), plain.step(batch, 1e-2)
        assert ours.loss_sum == pytest.approx(wanted.loss_sum, rel=1e-6)
        assert ours.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)


def test_checkpointing_spares_memory(start, pack, monkeypatch):
    """Of a row long enough for activations to matter, computed at once."""
    monkeypatch.setattr("pippin.engines.mlx.trainer.BUSY", 10**6)
    rng = np.random.default_rng(0)
    batch = [pack([[rng.integers(3, 97, 100).astype(np.int32) for _ in range(40)]])]
    peaks = []
    for on in (False, True):
        trainer = start(Train(gradient_checkpointing=on))
        mx.reset_peak_memory()
        trainer.step(batch, 1e-3)
        peaks.append(mx.get_peak_memory())
    assert peaks[1] < 0.87 * peaks[0]


def test_packing_needs_no_square_of_the_row(start, pack):
    """Twice the samples take twice the memory, not four times."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, 97, 100).astype(np.int32) for _ in range(80)]
    trainer, peaks = start(), []
    for count in (40, 80):
        mx.reset_peak_memory()
        trainer.step([pack([rows[:count]])], 1e-3)
        peaks.append(mx.get_peak_memory())
    assert peaks[1] < 2.4 * peaks[0]


def test_the_frozen_weights_are_never_touched(start, samples, pack, tiny):
    trainer = start()
    for _ in range(3):
        trainer.step([pack([samples])], 1e-1)
    stored = Checkpoint(tiny("llama"))
    modules = dict(trainer.network.named_modules())
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        frozen = np.array(modules[name].base.weight)
        np.testing.assert_array_equal(frozen, stored.read(f"{name}.weight"))


def test_a_broken_step_moves_nothing(start, samples, pack):
    trainer = start()
    trainer.step([pack([samples])], 1e-2)
    before = trainer.weights()
    name = next(iter(before))
    trainer.optimizer.masters[name] = trainer.optimizer.masters[name] * float("nan")
    held = {n: np.array(a) for n, a in trainer.optimizer.masters.items()}
    result = trainer.step([pack([samples])], 1e-2)
    assert not np.isfinite(result.loss_sum)
    for n, array in trainer.weights().items():
        np.testing.assert_array_equal(array, held[n])


@pytest.mark.parametrize("limit", [1e-3, 1e3])
def test_gradients_are_clipped_to_the_norm(start, samples, pack, limit):
    """Against an unclipped run whose gradients were scaled by hand."""
    clipped, free = (start(Train(max_grad_norm=n, eps=1.0)) for n in (limit, 0.0))
    norm = clipped.step([pack([samples])], 1.0).grad_norm
    free.step([pack([samples])], 1.0)
    name = "model.layers.0.self_attn.q_proj.lora_B.weight"
    small, large = clipped.optimizer.moments[0][name], free.optimizer.moments[0][name]
    np.testing.assert_allclose(np.array(small), np.array(large) * min(1, limit / norm), rtol=1e-3)


def test_a_state_of_another_adapter_is_refused(start):
    state = start().state()
    with pytest.raises(ModelError, match=r"k_proj\.lora_B\.weight is \(16, 4\)"):
        start(lora=Lora(rank=4), kind="llama_head100").restore(state)


def test_what_does_not_move_is_an_error(start, samples, pack):
    trainer = start()
    trainer.places.pop("model.layers.0.mlp.down_proj.lora_B.weight")
    with pytest.raises(ModelError, match="did not move in update 1"):
        trainer.step([pack([samples])], 1e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.9.mlp.up_proj": ((4, 32), (48, 4))}, "has no such layer"),
        ({"model.layers.0.mlp.up_proj": ((4, 30), (48, 4))}, r"lora_A of the adapter is \(4, 30\)"),
        ({"model.norm": ((4, 32), (32, 4))}, "is a RMSNorm, not a linear"),
    ],
)
def test_adapters_that_do_not_fit(engine, tiny, change, message):
    pairs = {
        f"{name}.lora_{side}.weight": np.zeros(shape, np.float32)
        for name, shapes in change.items()
        for side, shape in zip("AB", shapes, strict=True)
    }
    with pytest.raises(ModelError, match=message):
        engine.load(tiny("llama"), "float32").trainer(Train(), LORA, pairs, 0)


def test_float8_does_not_exist(start):
    with pytest.raises(ModelError, match="float8 does not exist in MLX"):
        start(Train(frozen_dtype="float8"))


def test_a_window_that_is_left_out_limits_the_samples(start, samples, pack):
    trainer = start(kind="gemma2")
    with pytest.raises(ModelError, match="exceed the attention window of 4"):
        trainer.step([pack([samples])], 1e-2)
