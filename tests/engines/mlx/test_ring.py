"""Two processes that train together over the ring, against one."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pippin.engines import load_engine
from pippin.recipe import Lora, Train

pytest.importorskip("mlx.core")
pytestmark = [pytest.mark.mlx, pytest.mark.slow]

LORA = Lora(rank=4, alpha=8, dropout=0.2)
STEPS = 6


def train(folder: Path) -> list[tuple[float, float]]:
    """Losses and gradient norms of updates on samples of uneven lengths, with dropout."""
    import numpy as np

    from pippin.data.batches import Sample, lay_out
    from pippin.model.adapter import adapted_linears, new_adapter
    from pippin.model.weights import Checkpoint

    weights = new_adapter(adapted_linears(Checkpoint(folder), LORA), LORA, seed=0)
    engine = load_engine("mlx", "cpu")
    if os.environ.get("MLX_RANK") == "1":
        engine.follow()
        return []
    trainer = engine.load(folder, "float32").trainer(Train(), LORA, weights, 0)
    rng, seen = np.random.default_rng(0), []
    for number in range(STEPS):
        samples = [
            Sample(tokens=rng.integers(3, 97, n).astype(np.int32), scored=np.arange(n) > 0, row=0)
            for n in (150, 40, 130, 20)[: 1 if number == 3 else 4]
        ]
        result = trainer.step([lay_out([samples], 512)], 1e-2)
        seen.append((result.loss_sum / result.tokens, result.grad_norm))
    engine.let_go("")
    return seen


def test_two_processes_have_the_losses_of_one(tiny, tmp_path):
    """The fourth update has one sample, so one of the two has nothing to compute."""
    folder = tiny("llama")
    ports = [free_port() for _ in range(2)]
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
    code = (
        f"import json, sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_ring; "
        f"from pathlib import Path; print(json.dumps(test_ring.train(Path({str(folder)!r}))))"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [json.loads(process.communicate(timeout=90)[0].splitlines()[-1]) for process in running]
    assert told[1] == []
    for ours, wanted in zip(told[0], train(folder), strict=True):
        assert ours == pytest.approx(wanted, rel=1e-5)


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
