"""A tiny model end to end: quantized folder to .aimodel, executed in Core AI's own runtime."""

import asyncio
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.targets.tiny_quantized import CHANNEL, LINEAR, write_folder

from pippin.engines import Sampling
from pippin.errors import ModelError, PippinError
from pippin.model.quantized import DenseView
from pippin.quantizers import Grid
from pippin.recipe import Quantize
from pippin.targets import Bundle, load_target
from pippin.targets.agreement import compare, load_parent, require
from pippin.targets.folder import Folder

torch = pytest.importorskip("torch")
pytest.importorskip("coreai_torch")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.coreai,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
TARGET, CONTEXT = "coreai", 64
SLOW_KINDS = ("gemma2", "llama3_rope", "mistral", "odd_heads", "openllama", "untied")
PROMPT = np.array([5, 6, 7, 250, 9], np.int32)


def test_the_file_computes_what_torch_does(model, source):
    parent = load_parent(source)
    rows = np.arange(24, dtype=np.int32).reshape(2, 12) * 5 % 320
    np.testing.assert_allclose(model.logprobs(rows), parent.logprobs(rows), atol=1e-4)
    greedy = Sampling(max_tokens=12)
    assert list(model.generate([PROMPT], greedy)) == list(parent.generate([PROMPT], greedy))


def test_decode_continues_prefill(model):
    whole = model.logits(PROMPT)
    model.last_logits(PROMPT[:2], 0)
    np.testing.assert_allclose(model.last_logits(PROMPT[2:4], 2), whole[3], atol=1e-4)
    np.testing.assert_allclose(model.last_logits(PROMPT[4:], 4), whole[4], atol=1e-4)


def test_the_last_slot_of_the_context_is_used(model):
    row = np.arange(CONTEXT, dtype=np.int32)
    assert np.isfinite(model.logprobs(row[None])).all()
    assert len(list(model.generate([row], Sampling(max_tokens=5)))) == 1
    with pytest.raises(ModelError, match=f"context of {CONTEXT}"):
        model.logits(np.zeros(CONTEXT + 1, np.int32))


def test_the_bundle_describes_itself(bundle):
    found = json.loads((bundle / "deploy.json").read_text())
    assert (found["target"], found["context"], found["stop_ids"]) == ("coreai", CONTEXT, [2])
    assert found["check"]["greedy_equal"] == found["check"]["greedy_tokens"] > 0
    assert found["check"]["mean_kl"] < 1e-6
    assert any(name.startswith("model.aimodel/") for name in found["digests"])


def test_the_readme_s_program_answers(bundle, model, monkeypatch):
    monkeypatch.chdir(bundle)
    (program,) = re.findall(r"```python\n(.*?)```", Path("README.md").read_text(), re.DOTALL)
    names = {}
    exec(program, names)

    async def answer():
        return [token async for token in names["answer"](PROMPT.tolist(), 6)]

    steps = model.generate([PROMPT], Sampling(max_tokens=6))
    assert asyncio.run(answer()) == [token for (token,) in steps]


def test_codes_are_stored_once_and_packed(bundle, source):
    """Embedding and tied head share one copy: less than 5/4 of the folder's tensors."""
    folder = (source / "model.safetensors").stat().st_size
    found = json.loads((bundle / "deploy.json").read_text())["size_bytes"]
    assert found < 1.25 * folder + 400_000  # the program


@pytest.mark.parametrize(
    "grid",
    [
        Grid(bits=4, group_size=32, symmetric=False),
        Grid(bits=3, group_size=32, symmetric=True),
        CHANNEL,
    ],
)
def test_a_matrix_expands_to_the_quantized_weights_bit_for_bit(quantized, grid):
    from pippin.targets.coreai.parts import Matrix

    place, name = quantized("llama", lambda module: grid), "model.layers.1.mlp.gate_proj"
    made = Matrix(Folder(place).affine(name))().numpy()
    np.testing.assert_array_equal(made, DenseView(place).read(f"{name}.weight"))


def test_another_model_s_figures_are_refused(model, tmp_path):
    other = write_folder(tmp_path, "llama", lambda module: CHANNEL)
    agreement = compare(model, load_parent(other), [PROMPT.tolist()], CONTEXT)
    with pytest.raises(PippinError, match="does not compute what the quantized model does"):
        require("coreai", agreement, 1e-4, 0.98)


def test_a_full_disk_is_told(source, tmp_path, monkeypatch):
    """Core AI's compiler ends the process there."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=90_000))
    with pytest.raises(OSError, match="No space left"):
        list(load_target(TARGET).write(Bundle(quantized=source, folder=tmp_path, context=CONTEXT)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "grid"),
    [
        ("qwen2", Grid(bits=4, group_size=32, symmetric=False)),
        ("qwen3", Grid(bits=3, group_size=32, symmetric=True)),
        ("gemma3_short", LINEAR),
        *(pytest.param(kind, LINEAR, marks=pytest.mark.slow) for kind in SLOW_KINDS),
    ],
)
def test_other_families_and_grids(deploy, quantized, tmp_path, kind, grid):
    bundle = deploy(quantized(kind, lambda module: grid), tmp_path / "made")
    assert json.loads((bundle / "deploy.json").read_text())["check"]["mean_kl"] < 1e-6


def test_an_altered_file_is_refused(bundle, tmp_path):
    copy = shutil.copytree(bundle, tmp_path / "copy")
    inside = next(path for path in sorted((copy / "model.aimodel").rglob("*")) if path.is_file())
    inside.write_bytes(inside.read_bytes() + b"x")
    with pytest.raises(ModelError, match=r"is not the file that was deployed"):
        load_target(TARGET).load(copy)


def test_models_that_are_not_built_are_refused(quantized):
    folder = quantized("llama", lambda module: LINEAR)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mamba2"}))
    assert "model type mamba2" in load_target(TARGET).refusal(Quantize(), folder)[0]
