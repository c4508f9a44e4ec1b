"""The bytes that the plan says a training step takes, against XLA's own plan of its buffers."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from tests.engines.test_train_memory import TOKENS, asked, full_row, write_model

from pippin.engines.jax.trainer import train_step
from pippin.memory.jax import jax_bytes
from pippin.model.adapter import adapted_linears, new_adapter
from pippin.model.config import read_config
from pippin.model.weights import Checkpoint
from pippin.recipe import Lora, Train

pytestmark = pytest.mark.jax


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_takes_the_buffers_that_xla_plans(tmp_path, jax_engine, checkpointing):
    lora, train = Lora(rank=8), Train(row_tokens=TOKENS, gradient_checkpointing=checkpointing)
    folder = write_model(tmp_path, "llama")
    adapter = new_adapter(adapted_linears(Checkpoint(folder), lora), lora, 0)
    trainer = jax_engine.load(folder, "float32").trainer(train, lora, adapter, 0)
    figures = np.float32(1), np.float32(1), np.int32(1)
    state = trainer.rule, trainer.masters, trainer.frozen, trainer._arrays([full_row()])
    lowered = train_step.lower(*state, jax.random.key(0), *figures)
    planned = lowered.compile({"xla_backend_optimization_level": 0}).memory_analysis()
    shape = asked(folder, "lora", "float32", lora, checkpointing=checkpointing)
    forecast = replace(jax_bytes(read_config(folder), shape), in_checkpoint=0)
    found = planned.temp_size_in_bytes + planned.argument_size_in_bytes
    assert forecast.total == pytest.approx(found, rel=0.1)
