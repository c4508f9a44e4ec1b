"""A model read layer by layer gives the moments of the whole one."""

import numpy as np
import pytest

from pippin.data.batches import Sample, single_batches
from pippin.engines import load_engine
from pippin.engines.layered import ByLayer
from pippin.model.weights import Checkpoint

pytestmark = pytest.mark.torch

KINDS = ["llama", "qwen3", "gemma3"]


@pytest.fixture(params=["torch", pytest.param("mlx", marks=pytest.mark.mlx)])
def engine(request):
    """Every one that takes models apart."""
    pytest.importorskip(request.param)
    return load_engine(request.param, "cpu")


@pytest.fixture
def batches(samples):
    whole = [
        Sample(tokens=tokens, scored=np.arange(len(tokens)) > 0, row=row)
        for row, tokens in enumerate(samples)
    ]
    return single_batches(whole, 2)


def _layered(engine, folder, scratch) -> ByLayer:
    model = engine.load_layers(Checkpoint(folder), "float32", scratch)
    assert model is not None
    return model


def _same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, moment in wanted.items():
        scale = float(np.abs(moment).max())
        np.testing.assert_allclose(found[name], moment, atol=1e-4 * scale, err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_moments_equal_the_whole_model_s(kind, tiny, engine, batches, tmp_path):
    whole, layered = engine.load(tiny(kind), "float32"), _layered(engine, tiny(kind), tmp_path)
    layered.input_moments(batches, ["model.layers.0.mlp.up_proj"])  # a round that is left
    _same(layered.loss_moments(batches, seed=3), whole.loss_moments(batches, seed=3))
    _same(layered.input_moments(batches), whole.input_moments(batches))
    assert not list(tmp_path.iterdir())


def test_layers_in_their_order_take_one_round(tiny, engine, batches, tmp_path, monkeypatch):
    model, reads = _layered(engine, tiny("llama"), tmp_path), []
    whole = model.loss_moments(batches, seed=0)
    read = Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda s, n: reads.append(n) or read(s, n))
    by_layer = {}
    for layer in (1, 0):
        linears = [name for name in whole if f"layers.{layer}." in name]
        by_layer |= model.loss_moments(batches, linears, seed=0)
    assert by_layer.keys() == whole.keys() - {"lm_head"}
    for name, moment in by_layer.items():
        np.testing.assert_array_equal(moment, whole[name])
    assert len(reads) == 2 * len(set(reads))  # once forward, once back
    model.loss_moments(batches, ["model.layers.1.mlp.up_proj"], seed=0)  # it has passed
    assert len(reads) > 2 * len(set(reads))


def test_memory_holds_no_layer_between_rounds(tiny, engine, batches, tmp_path):
    model = _layered(engine, tiny("llama"), tmp_path)
    before = _held(model)
    model.input_moments(batches)
    assert _held(model) - before < 4 * 64 * 64  # of the least linear


def _held(model) -> int:
    """Bytes of weights in memory."""
    if type(model).__module__.startswith("pippin.engines.mlx"):
        return pytest.importorskip("mlx.core").get_active_memory()
    return sum(p.nbytes for p in model._network.parameters() if p.device.type != "meta")


def test_another_family_is_left_whole(tiny, engine, tmp_path):
    assert engine.load_layers(Checkpoint(tiny("gpt_oss")), "float32", tmp_path) is None
