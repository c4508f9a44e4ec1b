"""The MLX engine, and adapters for models that it loaded."""

from collections.abc import Callable

import numpy as np
import pytest

from pippin.engines import Weights, load_engine

pytest.importorskip("mlx.core")


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
        from pippin.recipe import Lora

        rng, weights = np.random.default_rng(5), {}
        for name, (inputs, outputs) in adapted_linears(Checkpoint(folder), Lora()).items():
            a, b = rng.normal(0, 0.2, (rank, inputs)), rng.normal(0, 0.2, (outputs, rank)) * live
            weights[f"{name}.lora_A.weight"] = a.astype(np.float32)
            weights[f"{name}.lora_B.weight"] = b.astype(np.float32)
        return weights

    return make
