"""The quantize stage: a folder mlx-lm loads as it is, and a report that leaves nothing out."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pippin.artifact import Origin
from pippin.errors import ModelError
from pippin.events import Event, Finished, Notice
from pippin.job import Job
from pippin.model.config import read_config
from pippin.model.quantized import bits_per_weight, dense_tensors, layout
from pippin.model.weights import Checkpoint
from pippin.quantizers import kernels
from pippin.recipe import Data, Model, Quantize, Recipe
from pippin.stages.quantize import quantize

Tiny = Callable[[str], Path]
SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A random Llama whose widths groups divide, made by transformers."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")

    def make(dtype: str = "float32", **changes: Any) -> Path:
        folder = tmp_path_factory.mktemp("model")
        torch.manual_seed(0)
        network = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SHAPE, **changes}))
        network.to(getattr(torch, dtype)).save_pretrained(folder)
        return folder

    return make


def _quantize(source: Path, folder: Path, **settings: Any) -> list[Event]:
    recipe = Recipe(
        model=Model(source="x"),
        data=Data(source="x"),
        quantize=Quantize(**{"method": "rtn", **settings}),
    )
    origin = Origin(stage="quantize", inputs={}, settings={}, versions={})
    job = Job(
        stage="quantize", recipe=recipe, inputs={"model": source}, folder=folder, origin=origin
    )
    return list(quantize(job))


def _rows(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        row["name"]: row for row in json.loads((folder / "quantize.json").read_text())["tensors"]
    }


def _notices(events: list[Event]) -> str:
    return "\n".join(event.text for event in events if isinstance(event, Notice))


SETTINGS: dict[str, dict[str, Any]] = {
    "4 bits affine": {},
    "8 bits symmetric per channel": {"bits": 8, "group_size": 0, "scheme": "symmetric"},
    "3 bits, groups of 32": {"bits": 3, "group_size": 32, "embed_bits": 4},
    "embeddings dense": {"group_size": 128, "embed_bits": 16},
    "one kept": {"keep": ("model.layers.1.*down_proj",), "bits": 6, "embed_bits": 5},
    "2 bits": {"bits": 2, "embed_scheme": "symmetric", "embed_group_size": 32},
}


@pytest.mark.mlx
@pytest.mark.torch
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_mlx_lm_loads_the_folder_and_computes_what_dense_weights_compute(
    model: Callable[..., Path], tmp_path: Path, settings: dict[str, Any], tied: bool
) -> None:
    mx = pytest.importorskip("mlx.core")
    utils = pytest.importorskip("mlx_lm.utils")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    source = model(tie_word_embeddings=tied)
    _quantize(source, tmp_path / "q", **settings)
    theirs, _ = utils.load_model(tmp_path / "q")
    tokens = [[5, 17, 3, 80, 41, 9, 60, 2]]
    found = np.array(theirs(mx.array(tokens)).astype(mx.float32))

    dense = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    state = {n: torch.from_numpy(t) for n, t in dense_tensors(tmp_path / "q")}
    missing, unexpected = dense.load_state_dict(state, strict=False)
    assert missing == (["lm_head.weight"] if tied else [])
    assert unexpected == []
    with torch.no_grad():
        want = dense(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(found, want, atol=2e-4 * np.abs(want).max())


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_report_agrees_with_the_files(
    model: Callable[..., Path], tmp_path: Path, dtype: str
) -> None:
    source, folder = model(dtype), tmp_path / "q"
    events = _quantize(source, folder)
    before, rows = Checkpoint(source), _rows(folder)
    assert rows.keys() == before.tensors.keys()
    for name, tensor in dense_tensors(folder):
        weight = before.read(name).astype(np.float64)
        away = tensor.astype(np.float64) - weight
        relative = np.linalg.norm(away) / np.linalg.norm(weight)
        assert rows[name]["relative_error"] == pytest.approx(relative, rel=1e-3, abs=1e-9)
        assert rows[name]["max_error"] == pytest.approx(np.abs(away).max(), rel=1e-3, abs=1e-9)
        if rows[name]["scheme"] == "kept":
            assert relative == 0
    scales = Checkpoint(folder).tensors["model.layers.0.mlp.up_proj.scales"]
    assert scales.dtype.name == dtype
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert finished.summary["bits_per_weight"] == bits_per_weight(folder)
    weights = sum(np.prod(info.shape) for info in before.tensors.values())
    stored = sum(t.nbytes for t in _raw(folder).values())
    assert finished.summary["bits_per_weight"] == pytest.approx(8 * stored / weights)


def _raw(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


@pytest.mark.torch
def test_width_that_the_group_does_not_divide_is_named(
    model: Callable[..., Path], tmp_path: Path
) -> None:
    source = model(intermediate_size=96, hidden_size=64)
    events = _quantize(source, tmp_path / "a", group_size=64)
    rows, config = _rows(tmp_path / "a"), read_config(tmp_path / "a")
    down = "model.layers.0.mlp.down_proj"
    assert rows[f"{down}.weight"]["group_size"] == 32
    assert rows[f"{down}.weight"]["note"] == "groups of 32: 64 does not divide 96"
    assert "down_proj and 1 more: groups of 32: 64 does not divide 96" in _notices(events)
    grid = layout(config, down)
    assert grid is not None
    assert grid.group_size == 32

    source = model(intermediate_size=80, hidden_size=64)
    events = _quantize(source, tmp_path / "b", group_size=64)
    row = _rows(tmp_path / "b")[f"{down}.weight"]
    assert (row["scheme"], row["bits"]) == ("kept", 32)
    assert "kept dense, width 80 is not a multiple of 32" in _notices(events)
    assert layout(read_config(tmp_path / "b"), down) is None


@pytest.mark.torch
def test_config_for_mlx_and_for_transformers(model: Callable[..., Path], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    asked = {"scheme": "affine", "embed_group_size": 64}
    _quantize(model(tie_word_embeddings=True), tmp_path / "q", **asked)
    raw = json.loads((tmp_path / "q" / "config.json").read_text())
    assert raw["rope_theta"] == 100000.0
    assert "quantization_config" not in raw
    assert raw["quantization"] == {
        "group_size": 64,
        "bits": 4,
        "model.embed_tokens": {"group_size": 64, "bits": 8},
        "mode": "affine",
    }
    embedding = layout(read_config(tmp_path / "q"), "model.embed_tokens")
    linear = layout(read_config(tmp_path / "q"), "model.layers.1.mlp.up_proj")
    assert embedding is not None
    assert linear is not None
    assert embedding.symmetric
    assert not linear.symmetric
    assert transformers.AutoConfig.from_pretrained(tmp_path / "q").hidden_size == 128


@pytest.mark.torch
def test_tied_copy_of_the_head_is_left_out(model: Callable[..., Path], tmp_path: Path) -> None:
    source = model(tie_word_embeddings=True)
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    events = _quantize(source, tmp_path / "q")
    assert "lm_head.weight: left out, the head is tied" in _notices(events)
    assert not any(name.startswith("lm_head") for name in _raw(tmp_path / "q"))


@pytest.mark.torch
def test_experts_stay_dense_and_are_named(tiny: Tiny, tmp_path: Path) -> None:
    events = _quantize(tiny("gpt_oss"), tmp_path / "q", group_size=32)
    rows = _rows(tmp_path / "q")
    experts = {name for name in rows if "experts" in name and len(rows[name]["shape"]) == 3}
    assert experts
    assert all(rows[name]["scheme"] == "kept" and rows[name]["note"] for name in experts)
    assert "no linear of a decoder layer" in _notices(events)
    assert rows["model.layers.0.self_attn.q_proj.weight"]["bits"] == 4


@pytest.mark.torch
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_named(
    model: Callable[..., Path], tmp_path: Path, name: str, value: float
) -> None:
    source = shutil.copytree(model(), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors[name] = tensors[name].copy()
    tensors[name].reshape(-1)[7] = value
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ModelError, match=rf"{name} holds weights that are not finite"):
        _quantize(source, tmp_path / "q")
    assert not (tmp_path / "q").exists()


@pytest.mark.torch
def test_refusals(model: Callable[..., Path], tmp_path: Path) -> None:
    _quantize(model(), tmp_path / "q")
    with pytest.raises(ModelError, match="quantized already"):
        _quantize(tmp_path / "q", tmp_path / "again")
    with pytest.raises(ModelError, match=r"'lm_haed' matches no tensor"):
        _quantize(model(), tmp_path / "again", keep=("lm_haed",))


@pytest.mark.torch
def test_same_input_same_bytes(model: Callable[..., Path], tmp_path: Path) -> None:
    source = model()
    for name in "ab":
        _quantize(source, tmp_path / name)
    first, second = (tmp_path / name / "model.safetensors" for name in "ab")
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.torch
@pytest.mark.parametrize("scheme", ["affine", "symmetric"])
def test_the_same_bytes_without_kernels(
    model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    source = model("bfloat16")
    _quantize(source, tmp_path / "a", scheme=scheme)
    monkeypatch.setitem(kernels.COMPILED.__dict__, "missing", "g++ is not installed")
    events = _quantize(source, tmp_path / "b", scheme=scheme)
    assert "rounded in numpy, which is slower: g++ is not installed" in _notices(events)
    first, second = (tmp_path / name / "model.safetensors" for name in "ab")
    assert first.read_bytes() == second.read_bytes()
