"""The MLX engine, and adapters for models that it loaded."""

from collections.abc import Callable

import numpy as np
import pytest

from pippin.engines import Weights, load_engine
from pippin.recipe import Lora, Train

pytest.importorskip("mlx.core")

LORA = Lora(rank=4, alpha=8)


@pytest.fixture(scope="session")
def engine():
    """MLX on the CPU."""
    return load_engine("mlx", "cpu")


@pytest.fixture(scope="session")
def reference():
    """PyTorch, which the numbers are compared with."""
    import torch

    torch.set_num_threads(1)
    return load_engine("torch", "cpu")


@pytest.fixture(scope="session")
def adapter() -> Callable[..., Weights]:
    """A first adapter over all linears of a folder but its head; B zero unless `live`."""

    def make(folder, rank: int = 4, live: bool = False) -> Weights:
        from pippin.model.adapter import adapted_linears
        from pippin.model.weights import Checkpoint

        rng, weights = np.random.default_rng(5), {}
        for name, (inputs, outputs) in adapted_linears(Checkpoint(folder), Lora()).items():
            a, b = rng.normal(0, 0.2, (rank, inputs)), rng.normal(0, 0.2, (outputs, rank)) * live
            weights[f"{name}.lora_A.weight"] = a.astype(np.float32)
            weights[f"{name}.lora_B.weight"] = b.astype(np.float32)
        return weights

    return make


@pytest.fixture
def start(tiny, engine, adapter):
    """A trainer on a tiny model: settings, adapter settings, dtype, kind or folder."""

    def make(train=None, lora=LORA, dtype="float32", kind="llama", seed=0, live=False):
        folder = tiny(kind) if isinstance(kind, str) else kind
        weights = adapter(folder, live=live) if lora else {}
        return engine.load(folder, dtype).trainer(train or Train(), lora, weights, seed)

    return make


def gradients(trainer, batches):
    """The summed gradients, as `step` makes them."""
    parts = [trainer.grad(trainer.optimizer.masters, trainer._rows(b))[1] for b in batches]
    return {name: sum(np.array(part[name], float) for part in parts) for name in parts[0]}
