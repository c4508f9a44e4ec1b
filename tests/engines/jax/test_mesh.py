"""Two CPU devices give one device's losses, whether rows or weights are split."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.jax

PROGRAM = """
import json, sys
from pathlib import Path
from tests.engines.jax.test_trainer import ROW, first_adapter, packed, trained
from pippin.engines import load_engine
from pippin.recipe import Train
folder, rows, method = sys.argv[1:]
train = Train(row_tokens=ROW, batch_rows=int(rows))
engine = load_engine("jax", "cpu")
trainer = trained(engine, Path(folder), train, *([None] if method == "full" else []))
losses = [trainer.step([packed((60, 90), s, int(rows))], 1e-2).loss_sum for s in range(4)]
from pippin.engines.jax.trainer import train_step
print(json.dumps([losses, list(trainer.notices), train_step._cache_size()]))
"""


def losses(folder, devices, rows, method):
    flags = f"--xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), str(rows), method],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("rows", "method", "parts"),
    [(2, "lora", "rows in 2 parts, weights in 1"), (1, "full", "rows in 1 parts, weights in 2")],
)
def test_two_devices_give_the_losses_of_one(tiny, rows, method, parts):
    one, silent, _ = losses(tiny("llama"), 1, rows, method)
    two, notices, compiled = losses(tiny("llama"), 2, rows, method)
    assert silent == []
    assert notices == [f"trains on 2 devices: {parts}"]
    assert compiled == 1
    np.testing.assert_allclose(two, one, rtol=1e-5)
    assert two[0] != two[-1]
