"""What a CPU spares in training: shared beginnings, and weights in two bytes; no number changes."""

import shutil
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.engines.mlx.conftest import LORA, gradients

from pippin.model.adapter import adapted_linears, first_magnitudes
from pippin.model.weights import Checkpoint
from pippin.recipe import Lora, Train

pytestmark = pytest.mark.mlx


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3"])
def test_a_beginning_that_samples_share_is_computed_once(
    start, reference, tiny, pack, kind, monkeypatch
):
    """Losses and gradients are those of whole samples, past a window; PyTorch's losses too."""
    rng = np.random.default_rng(4)
    prompts = [rng.integers(3, 97, n).astype(np.int32) for n in (12, 20)]
    rests = [rng.integers(3, 97, n).astype(np.int32) for n in (3, 6, 2, 4, 9)]
    samples = [np.concatenate([prompts[i % 2], rest]) for i, rest in enumerate(rests)]
    trainer = start(kind=kind, live=True)
    together, alone = pack([samples[:3], samples[3:]], 12), [pack([[s]], 12) for s in samples]
    parts = trainer._parts(together, shares=True)
    assert sum(len(part.real_N) for part in parts) == together.real_tokens - 11 * 2 - 11 - 5
    loss, grads = trainer.grad(trainer.optimizer.masters, parts[0])
    wanted = gradients(trainer, alone)
    for name, grad in grads.items():
        scale = max(np.abs(wanted[name]).max(), 1e-3)
        np.testing.assert_allclose(grad, wanted[name], atol=3e-5 * scale, err_msg=name)
    other = reference.load(tiny(kind), "float32").trainer(Train(), LORA, trainer.weights(), 0)
    theirs = sum(other.loss(batch)[0] for batch in alone)
    assert [loss.item(), trainer.loss(together)[0]] == pytest.approx([theirs] * 2, rel=1e-5)
    monkeypatch.setattr("pippin.engines.mlx.trainer.BUSY", 20)  # beginnings stand in several parts
    parts = trainer._parts(together, shares=True)
    assert len(parts) == 3
    assert sum(trainer._plain_loss(part) for part in parts) == pytest.approx(theirs, rel=1e-5)


def test_samples_that_drop_their_inputs_share_nothing(start, pack):
    batch = pack([[np.arange(3, 30, dtype=np.int32)] * 3], 25)
    drops = start(lora=Lora(rank=4, dropout=0.5))._laid_out(batch)
    assert sum(len(part.real_N) for part in drops) == batch.real_tokens - 3
    assert list(drops[0].packing.positions_T) == [*range(26)] * 3


@pytest.mark.parametrize("lora", [LORA, replace(LORA, dora=True)])
def test_frozen_weights_of_two_bytes_give_the_numbers_of_four(
    engine, tiny, adapter, tmp_path, samples, pack, lora, monkeypatch
):
    folder = shutil.copytree(tiny("qwen2"), tmp_path / "model")
    rounded = {
        name: np.array(mx.array(array).astype(mx.bfloat16).astype(mx.float32))
        for name, array in load_file(folder / "model.safetensors").items()
    }
    save_file(rounded, folder / "model.safetensors", {"format": "pt"})
    weights = adapter(folder, live=True)
    if lora.dora:
        weights |= first_magnitudes(Checkpoint(folder), adapted_linears(Checkpoint(folder), lora))
    narrow = engine.load(folder, "float32").trainer(Train(), lora, weights, 0)
    monkeypatch.setattr("pippin.engines.mlx.names.keep_narrow", lambda network: None)
    wide = engine.load(folder, "float32").trainer(Train(), lora, weights, 0)
    dtypes = [t.network.layers[0].mlp.up_proj.base.weight.dtype for t in (narrow, wide)]
    assert dtypes == [mx.bfloat16, mx.float32]
    for _ in range(2):
        assert narrow.step([pack([samples])], 1e-2) == wide.step([pack([samples])], 1e-2)
