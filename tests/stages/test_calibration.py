"""Calibrated methods end to end: what they read, what it costs in memory, and what it buys."""

import itertools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.tiny_runs import write_rows, write_speaking_model

from pippin import memory
from pippin.artifact import Origin, read_manifest
from pippin.data.batches import Sample
from pippin.data.chat import tokenize
from pippin.data.dataset import load_split
from pippin.engines import load_engine
from pippin.engines.torch.engine import TorchEngine, TorchModel
from pippin.errors import DataError, ModelError
from pippin.events import Event, Notice
from pippin.job import Job
from pippin.model.config import read_config
from pippin.model.quantized import BITS, DenseView
from pippin.model.tokenizer import load_tokenizer
from pippin.model.weights import Checkpoint, file_tensors, nbytes
from pippin.quantizers import Grid, load_quantizer
from pippin.quantizers.choices import choose_all
from pippin.quantizers.hessian import Hessian
from pippin.recipe import Data, Deploy, Model, Quantize, Recipe
from pippin.stages.calibration import Calibration, draw, passes
from pippin.stages.coding import Coder, Row
from pippin.stages.layers_done import LayersDone
from pippin.stages.quantize import quantize
from pippin.stages.sharing import holdable
from pippin.steps import make_steps
from pippin.targets import stored_bits

pytestmark = pytest.mark.torch

SETTINGS = Quantize(
    method="best",
    bits=3,
    group_size=32,
    scheme="affine",
    embed_group_size=32,
    embed_scheme="affine",
    calibration_tokens=400,
)
FEW = replace(SETTINGS, calibration_tokens=30)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model that speaks, and rows."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "model").mkdir()
    write_speaking_model(folder / "model")
    loud = load_file(folder / "model" / "model.safetensors")
    for name in loud:  # layers that matter: fresh ones are drowned by the residual
        loud[name] *= 6 if "proj" in name else 1
    save_file(loud, folder / "model" / "model.safetensors", metadata={"format": "pt"})
    write_rows(folder / "rows")
    return folder


def _recipe(
    place: Path, settings: Quantize = SETTINGS, seed: int = 0, engine: Any = "torch"
) -> Recipe:
    model = Model(source="model", device="cpu", dtype="float32", engine=engine)
    data = Data(source="rows", max_seq_len=64)
    deploy = Deploy(targets=())
    return Recipe(
        model=model, data=data, quantize=settings, deploy=deploy, seed=seed, folder=place, out="out"
    )


def _run(place: Path, folder: Path, settings: Quantize = SETTINGS, **changes: Any) -> list[Event]:
    origin = Origin(stage="quantize", inputs={}, settings={}, versions={})
    inputs = {"model": changes.pop("model", place / "model")}
    recipe = _recipe(place, settings, **changes)
    job = Job(stage="quantize", recipe=recipe, inputs=inputs, folder=folder, origin=origin)
    return list(quantize(job))


def _divergence(place: Path, folder: Path) -> float:
    """KL of the model before to the one after, over all of its tokens."""
    engine = load_engine("torch", "cpu")
    rows = load_split(_recipe(place).data, place, "test")
    samples = tokenize(rows, load_tokenizer(place / "model"), _recipe(place).data).samples
    tokens = np.concatenate([sample.tokens for sample in samples])[None]
    vocab = read_config(place / "model").vocab_size
    ids = np.broadcast_to(np.arange(vocab, dtype=np.int32), (1, tokens.shape[1], vocab))
    parent, child = (
        engine.load(path, "float32").topk(tokens, 0, np.ascontiguousarray(ids)).logprobs_BTK
        for path in (place / "model", folder)
    )
    return float((np.exp(parent) * (parent - child)).sum(-1).mean())


def _report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "quantize.json").read_text())


def _bytes(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("scheme", ["symmetric", "affine"])
def test_best_is_nearer_than_rtn(place: Path, tmp_path: Path, scheme: Any) -> None:
    found = {}
    for method in ("rtn", "mse", "gptq", "best"):
        settings = replace(SETTINGS, method=method, scheme=scheme)
        _run(place, tmp_path / method, settings)
        found[method] = _divergence(place, tmp_path / method)
    assert max(found["best"], found["gptq"]) < 0.5 * min(found["rtn"], found["mse"])


def test_inputs_that_count_alike_are_an_option(place: Path, tmp_path: Path) -> None:
    _run(place, tmp_path / "loss")
    _run(place, tmp_path / "inputs", replace(SETTINGS, importance="inputs"))
    assert _bytes(tmp_path / "loss") != _bytes(tmp_path / "inputs")
    assert _divergence(place, tmp_path / "loss") < 2 * _divergence(place, tmp_path / "inputs")


def test_bits_are_shared_out_under_a_budget(place: Path, tmp_path: Path) -> None:
    _run(place, tmp_path / "even", replace(SETTINGS, bits=4))
    _run(place, tmp_path / "shared", replace(SETTINGS, target_bits=5.0))
    report = _report(tmp_path / "shared")
    rows = [row for row in report["tensors"] if ".layers." in row["name"] and row["bits"] < 16]
    weights = [np.prod(row["shape"]) for row in rows]
    used = np.average([row["bits"] + 32 / row["group_size"] for row in rows], weights=weights)
    assert used == pytest.approx(report["budget"]["linear_bits"])
    assert 4.7 < used <= 5.0
    assert len({row["bits"] for row in rows}) > 1
    assert report["bits_per_weight"] <= _report(tmp_path / "even")["bits_per_weight"]
    shared, even = (_divergence(place, tmp_path / name) for name in ("shared", "even"))
    assert shared < even
    assert 0.2 < report["budget"]["expected_kl"] / shared < 5


def _half(place: Path, folder: Path) -> Path:
    """The model in float16: scales take two bytes."""
    half = Path(shutil.copytree(place / "model", folder / "half"))
    tensors = load_file(half / "model.safetensors")
    narrow = {name: tensor.astype(np.float16) for name, tensor in tensors.items()}
    save_file(narrow, half / "model.safetensors", metadata={"format": "pt"})
    return half


def test_a_budget_offers_what_the_targets_hold(place: Path, tmp_path: Path) -> None:
    """GGUF has no zero points beyond 5 bits; what other targets say is theirs."""
    half = _half(place, tmp_path)
    recipe = _recipe(place, replace(SETTINGS, target_bits=4.5))
    assert holdable(recipe, half) == BITS
    (half / "tokenizer.json").unlink()  # one without merges, which GGUF refuses first
    gguf = replace(recipe, deploy=Deploy(targets=("gguf",), context=64))
    gguf = replace(gguf, quantize=replace(gguf.quantize, embed_bits=5))
    assert holdable(gguf, half) == (2, 3, 4, 5)
    grids = [Grid(bits=bits, group_size=64, symmetric=False) for bits in (3, 4, 5)]
    assert [stored_bits(gguf, grid, 64) for grid in grids] == [5, 5, 6]  # a block of 32 is 24 bytes


def test_a_budget_below_what_codes_need_is_refused(place: Path, tmp_path: Path) -> None:
    for asked, least in (
        ({"target_bits": 2.5}, r"target_bits = 2.5: 3 bits is the least"),
        ({"max_size": "9kB"}, r"max_size = 9kB: \d+ kB is the least"),
    ):
        settings: Any = {**asked}
        with pytest.raises(ModelError, match=least):
            _run(place, tmp_path / "q", replace(SETTINGS, **settings))


def test_a_size_and_a_divergence_are_budgets_too(place: Path, tmp_path: Path) -> None:
    half = _half(place, tmp_path)
    _run(place, tmp_path / "sized", replace(SETTINGS, max_size="50kB"), model=half)
    report = _report(tmp_path / "sized")
    weights = file_tensors(tmp_path / "sized" / "model.safetensors").values()
    stored = sum(nbytes(info) for info in weights)
    assert report["budget"]["size_bytes"] == pytest.approx(stored, abs=2)
    assert 48_000 < stored <= 50_000
    nats = report["budget"]["expected_kl"]
    _run(place, tmp_path / "near", replace(SETTINGS, max_kl=1.001 * nats), model=half)
    assert _bytes(tmp_path / "near") == _bytes(tmp_path / "sized")
    curve = report["budget"]["curve"]
    assert curve == sorted(curve, key=lambda point: (point[0], -point[1]))
    assert curve[-1][1] == pytest.approx(0, abs=1e-9)  # every linear as it is
    _run(place, tmp_path / "left", replace(SETTINGS, max_size="90kB", embed_bits=16), model=half)
    bits = [_embedding_bits(tmp_path / folder) for folder in ("sized", "left")]
    assert bits[0] < 8
    assert bits[1] == 16


def _embedding_bits(folder: Path) -> int:
    rows = _report(folder)["tensors"]
    return next(row["bits"] for row in rows if row["name"] == "model.embed_tokens.weight")


def test_a_budget_may_leave_a_tensor_as_it_is(place: Path, tmp_path: Path) -> None:
    _run(place, tmp_path / "q", replace(SETTINGS, target_bits=15.0))
    rows = [row for row in _report(tmp_path / "q")["tensors"] if ".layers." in row["name"]]
    assert {row["scheme"] for row in rows if len(row["shape"]) == 2} == {"affine", "kept"}
    assert _divergence(place, tmp_path / "q") < 1e-4


def test_a_kill_loses_one_layer_at_most(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(FEW, recover_tokens=999)
    _run(place, tmp_path / "whole", settings)
    written, write = [], Coder.write

    def until_killed(self: Coder, name: str, *rest: Any) -> Any:
        if name == "model.layers.1.self_attn.v_proj.weight":
            raise KeyboardInterrupt
        return write(self, name, *rest)

    def noted(self: Coder, name: str, *rest: Any) -> Any:
        written.append(name)
        return write(self, name, *rest)

    monkeypatch.setattr(Coder, "write", until_killed)
    with pytest.raises(KeyboardInterrupt):
        _run(place, tmp_path / "cut", settings)
    assert not (tmp_path / "cut").exists()
    monkeypatch.setattr(Coder, "write", noted)
    _run(place, tmp_path / "cut", settings)
    assert not any("layers.0" in name and "proj" in name for name in written)
    assert sum("layers.1" in name and "proj" in name for name in written) == 7
    assert _bytes(tmp_path / "cut") == _bytes(tmp_path / "whole")
    assert _report(tmp_path / "cut")["recovered"]["kept"]
    assert _report(tmp_path / "cut")["tensors"] == _report(tmp_path / "whole")["tensors"]
    assert list(tmp_path.glob(".*")) == []


@pytest.mark.parametrize("change", ["settings", "damage"])
def test_layers_of_other_settings_or_damaged_are_made_again(
    place: Path, tmp_path: Path, change: str
) -> None:
    row = Row(name="a.weight", shape=(1, 32), scheme="affine", bits=4)
    origin = Origin(stage="quantize", inputs={}, settings={"bits": 4}, versions={})
    done = LayersDone(folder=tmp_path / "work", origin=origin)
    done.add(row, {"a.weight": np.zeros((1, 4), np.uint32)})
    done.flush(0)
    assert set(LayersDone(folder=tmp_path / "work", origin=origin).found) == {"a.weight"}
    if change == "settings":
        origin = replace(origin, settings={"bits": 8})
    else:
        with (tmp_path / "work" / "layer-0000" / "state.safetensors").open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"x")
    assert not LayersDone(folder=tmp_path / "work", origin=origin).found
    done.forget()
    assert not (tmp_path / "work").exists()


def test_awq_folds_its_scales(place: Path, tmp_path: Path) -> None:
    found = {}
    for method in ("rtn", "awq"):
        events = _run(place, tmp_path / method, replace(SETTINGS, method=method))
        found[method] = _divergence(place, tmp_path / method)
    assert found["awq"] < 1.3 * found["rtn"]  # a random model has no inputs that carry much
    texts = [event.text for event in events if isinstance(event, Notice)]
    assert "inputs of 12 linears are scaled" in texts
    rows = {row["name"]: row for row in _report(tmp_path / "awq")["tensors"]}
    assert rows["model.layers.0.mlp.down_proj.weight"]["method"] == "awq"
    assert rows["model.layers.0.self_attn.o_proj.weight"]["method"] == "awq"
    assert all(
        row["output_error"] < row["output_error_rtn"]
        for row in rows.values()
        if row["output_error"]
    )


def test_recovery_moves_scales_and_norms_alone_and_says_what_they_gave(
    place: Path, tmp_path: Path
) -> None:
    events = _run(place, tmp_path / "q", replace(FEW, recover_tokens=999))
    _run(place, tmp_path / "plain", FEW)
    found = _report(tmp_path / "q")["recovered"]
    assert found["kept"] == (found["kl_after"] < found["kl_before"])
    assert found["tokens_that_calibrated"] == _report(tmp_path / "q")["calibration_tokens"]
    assert any(
        e.text.startswith("scales and norms tuned: KL ") for e in events if isinstance(e, Notice)
    )
    tuned, plain = (Checkpoint(tmp_path / folder) for folder in ("q", "plain"))
    moved = {n for n in plain.tensors if not np.array_equal(tuned.read(n), plain.read(n))}
    norms = {name for name in moved if "norm" in name}
    assert norms == set(found["norms"])
    assert not any(name.endswith(".weight") or "embed" in name for name in moved - norms)
    assert bool(moved) == found["kept"]
    assert found["linears"] == (14 if found["kept"] else 0)
    assert _divergence(place, tmp_path / "q") < 1.02 * _divergence(place, tmp_path / "plain")


def test_recovery_needs_rows_that_calibration_left(place: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="0 rows left"):
        _run(place, tmp_path / "q", replace(SETTINGS, calibration_tokens=9999, recover_tokens=99))


def test_report_and_manifest(place: Path, tmp_path: Path) -> None:
    events = _run(place, tmp_path / "q")
    report = _report(tmp_path / "q")
    rows = {row["name"]: row for row in report["tensors"]}
    linear = rows["model.layers.0.mlp.up_proj.weight"]
    assert linear["method"] == "best"
    assert 0 < linear["output_error"] < 0.6 * linear["output_error_rtn"]
    embedding = rows["model.embed_tokens.weight"]
    assert (embedding["method"], embedding["output_error"]) == ("mse", None)
    manifest = read_manifest(tmp_path / "q")
    assert manifest is not None
    tokens = manifest["scores"]["calibration_tokens"]
    texts = [event.text for event in events if isinstance(event, Notice)]
    assert any(text.startswith(f"calibrated on {tokens:,} tokens of 12 ") for text in texts)
    assert any("all there are" in text for text in texts)


def test_a_head_of_few_bits_is_calibrated(place: Path, tmp_path: Path) -> None:
    _run(place, tmp_path / "q", replace(SETTINGS, embed_bits=4))
    rows = {row["name"]: row for row in _report(tmp_path / "q")["tensors"]}
    row = rows["model.embed_tokens.weight"]
    assert row["method"] == "best"
    assert row["output_error"] < row["output_error_rtn"]


def test_passes_of_any_size_give_the_same(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(place, tmp_path / "once")
    monkeypatch.setattr(memory, "MOMENTS", 1)
    with monkeypatch.context() as whole:
        whole.setattr(TorchEngine, "load_layers", lambda *asked, **how: None)
        _run(place, tmp_path / "often")
    assert _bytes(tmp_path / "once") == _bytes(tmp_path / "often")


@pytest.mark.parametrize("engine", ["torch", pytest.param("mlx", marks=pytest.mark.mlx)])
def test_sequential_gptq_reads_what_quantized_layers_give(
    place: Path, tmp_path: Path, engine: str
) -> None:
    """The second layer's codes, from inputs that transformers finds in float64."""
    pytest.importorskip(engine)
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    settings = replace(SETTINGS, method="gptq", sequential=True)
    _run(place, tmp_path / "q", settings, engine=engine)
    _run(place, tmp_path / "plain", replace(settings, sequential=False), engine=engine)
    network = transformers.AutoModelForCausalLM.from_pretrained(place / "model").double()
    parameters, view = dict(network.named_parameters()), DenseView(tmp_path / "q")
    for name in (n for n in view.grids if ".layers.0." in n):
        parameters[name].data = torch.from_numpy(view.read(name).astype(np.float64))
    seen: list[Any] = []
    linear = network.model.layers[1].mlp.down_proj
    linear.register_forward_pre_hook(lambda m, inputs: seen.append(inputs[0][0].numpy()))
    data = _recipe(place).data
    rows = tokenize(load_split(data, place, "train"), load_tokenizer(place / "model"), data)
    with torch.no_grad():
        for sample in rows.samples:
            network(torch.from_numpy(sample.tokens.astype(np.int64))[None])
    inputs, name = np.concatenate(seen), "model.layers.1.mlp.down_proj.weight"
    weight, grid = Checkpoint(place / "model").read(name), view.grids[name]
    hessian = Hessian((inputs.T @ inputs).astype(np.float32))
    wanted = load_quantizer("gptq").quantize(weight, grid, weight.dtype, hessian).codes_OI
    assert (view.read_codes(name).codes_OI == wanted).mean() > 0.99
    assert (DenseView(tmp_path / "plain").read_codes(name).codes_OI == wanted).mean() < 0.97


@pytest.mark.parametrize("importance", ["loss", "inputs"])
def test_a_large_model_is_read_layer_by_layer(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, importance: Any
) -> None:
    settings = replace(SETTINGS, importance=importance, embed_bits=4)
    _run(place, tmp_path / "whole", settings)
    monkeypatch.setattr(memory, "MOMENTS", 1)
    monkeypatch.setattr(TorchEngine, "load", None)
    events = _run(place, tmp_path / "layers", settings)
    texts = [event.text for event in events if isinstance(event, Notice)]
    assert "the model is read one decoder layer at a time" in texts
    errors = [
        {row["name"]: row["output_error"] or 0 for row in _report(tmp_path / name)["tensors"]}
        for name in ("whole", "layers")
    ]
    assert errors[0] == pytest.approx(errors[1], rel=0.05)
    assert list(tmp_path.glob(".*")) == []


def test_seed_draws_the_rows(place: Path, tmp_path: Path) -> None:
    few = replace(SETTINGS, calibration_tokens=20)
    _run(place, tmp_path / "a", few)
    _run(place, tmp_path / "b", few)
    _run(place, tmp_path / "c", few, seed=1)
    assert _bytes(tmp_path / "a") == _bytes(tmp_path / "b")
    assert _bytes(tmp_path / "a") != _bytes(tmp_path / "c")


def test_text_of_a_file_calibrates_in_the_place_of_rows(place: Path, tmp_path: Path) -> None:
    text = "".join(f"{i} times {i} is {i * i}. " for i in range(60))
    (tmp_path / "other.txt").write_text(text)
    asked = replace(SETTINGS, calibration=str(tmp_path / "other.txt"))
    step = next(s for s in make_steps(_recipe(place, asked)) if s.name == "quantize")
    assert step.inputs["calibration"] == tmp_path / "other.txt"
    origin = Origin(stage="quantize", inputs={}, settings={}, versions={})
    made = Job(
        stage="quantize",
        recipe=_recipe(place, asked),
        inputs={"model": place / "model", "calibration": step.inputs["calibration"]},
        folder=tmp_path / "other",
        origin=origin,
    )
    texts = [event.text for event in quantize(made) if isinstance(event, Notice)]
    assert any("rows of other.txt" in told for told in texts)
    _run(place, tmp_path / "own")
    assert _bytes(tmp_path / "other") != _bytes(tmp_path / "own")
    with pytest.raises(DataError, match="there is no file"):
        make_steps(_recipe(place, replace(asked, calibration="othr.txt")))


def test_draw_stops_at_the_tokens() -> None:
    samples = [
        Sample(tokens=np.full(5, i, np.int32), scored=np.arange(5) > 0, row=i) for i in range(10)
    ]
    drawn = draw(samples, 12, seed=3)
    assert len(drawn) == 3
    assert len({sample.row for sample in drawn}) == 3
    assert len(draw(samples, 1000, seed=3)) == 10


def test_passes_hold_the_budget(place: Path) -> None:
    checkpoint, config = Checkpoint(place / "model"), read_config(place / "model")
    choices = choose_all(checkpoint, config, SETTINGS)
    whole = list(passes(checkpoint, choices, config, 1 << 40))
    assert len(whole) == 1
    assert whole[0]["model.layers.1.self_attn.q_proj.weight"] == "model.layers.1.self_attn.q_proj"
    sizes = {
        name: memory.linear_moments(*checkpoint.tensors[name].shape[::-1]) for name in whole[0]
    }
    most = 3 * max(sizes.values())
    parts = list(passes(checkpoint, choices, config, most))
    assert [name for part in parts for name in part] == list(whole[0])
    held = [sum(sizes[name] for name in part) for part in parts]
    assert max(held) <= most < min(a + b for a, b in itertools.pairwise(held))
    embedded = choose_all(checkpoint, config, replace(SETTINGS, embed_bits=6))
    (part,) = passes(checkpoint, embedded, config, 1 << 40)
    assert part["model.embed_tokens.weight"] == "lm_head"


class Overflowing:
    """A model whose inputs are not finite."""

    def input_moments(self, batches: Any, names: Any) -> dict[str, np.ndarray]:
        return {name: np.full((4, 4), np.nan, np.float32) for name in names}


def test_inputs_that_are_not_finite_are_named(place: Path) -> None:
    overflowing: Any = Overflowing()
    calibration = Calibration(
        model=overflowing,
        checkpoint=Checkpoint(place / "model"),
        batches=[],
        rows=1,
        tokens=1,
        notices=(),
    )
    with pytest.raises(ModelError, match=r"inputs of layers\.3\.o_proj are not"):
        list(calibration.hessians({"layers.3.o_proj.weight": "layers.3.o_proj"}))


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.up_proj.weight"])
def test_weights_that_are_not_finite_are_named(place: Path, tmp_path: Path, name: str) -> None:
    broken = Path(shutil.copytree(place / "model", tmp_path / "copy"))
    tensors = load_file(broken / "model.safetensors")
    tensors[name] = tensors[name].copy()
    tensors[name].flat[7] = np.nan
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"{re.escape(name)} holds weights that are not finite"):
        _run(place, tmp_path / "q", model=broken)


def test_a_linear_the_engine_does_not_see_is_named(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = TorchModel.loss_moments

    def blind(self: Any, *asked: Any) -> Any:
        seen = whole(self, *asked)
        return {name: moment for name, moment in seen.items() if "o_proj" not in name}

    monkeypatch.setattr(TorchModel, "loss_moments", blind)
    events = _run(place, tmp_path / "q")
    texts = [event.text for event in events if isinstance(event, Notice)]
    assert "model.layers.0.self_attn.o_proj and 1 more: no inputs seen, rounded with mse" in texts
    rows = {row["name"]: row for row in _report(tmp_path / "q")["tensors"]}
    assert rows["model.layers.0.self_attn.o_proj.weight"]["method"] == "mse"


@pytest.mark.parametrize(("method", "reads"), [("best", True), ("gptq", True), ("mse", False)])
def test_the_step_depends_on_what_it_reads(place: Path, method: Any, reads: bool) -> None:
    def step(settings: Quantize, seed: int = 0) -> Any:
        steps = make_steps(_recipe(place, settings, seed))
        return next(step for step in steps if step.name == "quantize")

    settings = replace(SETTINGS, method=method)
    assert step(settings).reads_data == reads
    other = step(replace(settings, calibration_tokens=99))
    assert (other.settings != step(settings).settings) == reads
    assert (step(settings, seed=1).settings != step(settings).settings) == reads
    assert ("data.max_seq_len" in step(settings).settings) == reads
