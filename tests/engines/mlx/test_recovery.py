"""Scales, zero points and norms tuned in MLX, against the same in PyTorch."""

import numpy as np
import pytest
from tests.tiny_runs import quantize_folder

from pippin.data.batches import Batch, Sample, single_batches
from pippin.engines.recovery import Recoverer, Tune
from pippin.model.quantized import DenseView

pytest.importorskip("mlx.core")
pytestmark = [pytest.mark.mlx, pytest.mark.torch]

KINDS = {
    "llama": {"scheme": "affine", "group_size": 32},
    "gemma3": {"scheme": "symmetric", "group_size": 0},
}


def _batches() -> list[Batch]:
    rng = np.random.default_rng(0)
    samples = [
        Sample(tokens=rng.integers(3, 97, n).astype(np.int32), scored=np.arange(n) > 0, row=n)
        for n in rng.integers(8, 24, 36)
    ]
    return single_batches(samples, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_tuned_equals_pytorch_s(kind, tiny, tmp_path, engine, reference) -> None:
    """Stored in float32, no value rounds to another side."""
    settings = {"bits": 3, "embed_group_size": 32, "embed_scheme": "affine", **KINDS[kind]}
    folder = quantize_folder(tiny(kind), tmp_path / "q", **settings)
    models = [made.load(tiny(kind), "float32") for made in (engine, reference)]
    assert isinstance(models[0], Recoverer)
    tune = Tune(fresh=8, passes=2, seed=1)
    ours, wanted = (model.recover(folder, _batches(), tune) for model in models)
    for kl, other in ((ours.before, wanted.before), (ours.after, wanted.after)):
        assert kl == pytest.approx(other, rel=2e-3)
    assert ours.after < ours.before
    assert ours.tokens == wanted.tokens
    assert ours.weights.keys() == wanted.weights.keys()
    assert len(ours.weights) >= 2 * 7 * 2
    view = DenseView(folder)
    for name, tensor in ours.weights.items():
        other, first = wanted.weights[name], view.checkpoint.read(name)
        assert (tensor.dtype, tensor.shape) == (first.dtype, first.shape)
        # A gradient of nearly nothing may have either sign, and Adam steps as far for it.
        assert np.linalg.norm(tensor - other) < 0.1 * np.linalg.norm(other - first), name
