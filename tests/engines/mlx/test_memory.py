"""The bytes that the plan says a training step takes, against MLX's own count."""

import gc
from dataclasses import replace

import mlx.core as mx
import pytest
from tests.engines.test_train_memory import asked, full_row, write_model

from pippin.memory.mlx import mlx_bytes
from pippin.model.adapter import adapted_linears, new_adapter
from pippin.model.config import read_config
from pippin.model.weights import Checkpoint
from pippin.recipe import Lora, Train

pytestmark = pytest.mark.mlx


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_takes_what_mlx_counts(tmp_path, engine, checkpointing):
    lora, train = Lora(rank=8), Train(gradient_checkpointing=checkpointing)
    folder = write_model(tmp_path, "llama")
    adapter = new_adapter(adapted_linears(Checkpoint(folder), lora), lora, 0)
    gc.collect()
    trainer = engine.load(folder, "float32").trainer(train, lora, adapter, 0)
    trainer.step([full_row()], 1e-4)
    mx.reset_peak_memory()
    trainer.step([full_row()], 1e-4)
    peak = mx.get_peak_memory()
    del trainer
    gc.collect()
    others = mx.get_active_memory()  # now: what tests before left may have gone since the start
    shape = asked(folder, "lora", "float32", lora, checkpointing=checkpointing)
    forecast = replace(mlx_bytes(read_config(folder), shape), in_checkpoint=0)
    assert forecast.total == pytest.approx(peak - others, rel=0.15)
