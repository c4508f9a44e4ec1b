"""Two CPU devices give one device's losses, whether rows or weights are split."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from tests.engines.jax.test_trainer import LORA, ROW, packed, trained

from pippin.recipe import Train

pytestmark = pytest.mark.jax

# Rows a step, adapter or every weight, and how two devices share that.
CASES = [(2, LORA, "rows in 2 parts, weights in 1"), (1, None, "rows in 1 parts, weights in 2")]
PROGRAM = """
import json, sys
from pathlib import Path
from tests.engines.jax.test_mesh import CASES, losses
from pippin.engines import load_engine
engine = load_engine("jax", "cpu")
print(json.dumps([losses(engine, Path(sys.argv[1]), rows, lora) for rows, lora, _ in CASES]))
"""


def losses(engine, folder, rows, lora):
    """Four losses, what the trainer says, and how often its step was compiled."""
    from pippin.engines.jax.trainer import train_step

    before = train_step._cache_size()
    trainer = trained(engine, folder, Train(row_tokens=ROW, batch_rows=rows), lora)
    batches = [packed((60, 90), step, rows) for step in range(4)]
    found = [trainer.step([batch], 1e-2).loss_sum for batch in batches]
    return found, list(trainer.notices), train_step._cache_size() - before


def test_two_devices_give_the_losses_of_one(jax_engine, tiny):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tiny("llama"))],
        env={
            **os.environ,
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            "JAX_PLATFORMS": "cpu",
        },
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    on_two = json.loads(done.stdout.splitlines()[-1])
    for (rows, lora, parts), (two, notices, compiled) in zip(CASES, on_two, strict=True):
        one, silent, _ = losses(jax_engine, tiny("llama"), rows, lora)
        assert silent == []
        assert notices == [f"trains on 2 devices: {parts}"]
        assert compiled == 1
        np.testing.assert_allclose(two, one, rtol=1e-5)
        assert two[0] != two[-1]
