"""Batches and engines for the torch engine's tests."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from pippin.data.batches import Batch
from pippin.engines import Weights, load_engine


@pytest.fixture(scope="session")
def engine():
    """One thread: tiny products on a busy machine would wait for each other's threads."""
    import torch

    torch.set_num_threads(1)
    return load_engine("torch", "cpu")


@pytest.fixture(scope="session")
def samples() -> list[np.ndarray]:
    """Six samples of 2 to 11 tokens out of 97."""
    rng = np.random.default_rng(3)
    return [rng.integers(3, 97, n).astype(np.int32) for n in (5, 9, 2, 7, 11, 4)]


@pytest.fixture(scope="session")
def pack() -> Callable[..., Batch]:
    """Rows of samples -> a Batch, padded to one length; all but the first `unscored` scored."""

    def make(rows: Sequence[Sequence[np.ndarray]], unscored: int = 1) -> Batch:
        width = max(sum(map(len, row)) for row in rows) + 2
        arrays = [np.zeros((len(rows), width), np.int32) for _ in range(3)]
        scored = np.zeros((len(rows), width), bool)
        for number, row in enumerate(rows):
            start = 0
            for segment, sample in enumerate(row, 1):
                part = slice(start, start + len(sample))
                for array, values in zip(
                    arrays, (sample, np.arange(len(sample)), segment), strict=True
                ):
                    array[number, part] = values
                scored[number, start + unscored : start + len(sample)] = True
                start += len(sample)
        tokens, positions, segments = arrays
        return Batch(
            tokens_BT=tokens, positions_BT=positions, segments_BT=segments, scored_BT=scored
        )

    return make


@pytest.fixture(scope="session")
def adapter() -> Callable[..., Weights]:
    """A first adapter over all linears of a loaded model but its head; B zero unless `live`."""

    def make(model, rank: int = 4, live: bool = False) -> Weights:
        import torch

        rng, weights = np.random.default_rng(5), {}
        for name, linear in model.network.named_modules():
            if isinstance(linear, torch.nn.Linear) and name != "lm_head":
                a = rng.normal(0, 0.2, (rank, linear.in_features))
                b = rng.normal(0, 0.2, (linear.out_features, rank)) * live
                weights[f"{name}.lora_A.weight"] = a.astype(np.float32)
                weights[f"{name}.lora_B.weight"] = b.astype(np.float32)
        return weights

    return make
