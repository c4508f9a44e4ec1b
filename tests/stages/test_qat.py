"""Training on a quantized folder: exact resume, never worse by validation, refused by name."""

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.tiny_runs import write_rows, write_speaking_model

from pippin.artifact import Origin, read_manifest
from pippin.engines.torch.coded import CodesTrainer
from pippin.errors import Interrupted, ModelError
from pippin.events import Event, Notice, Progress
from pippin.job import Job
from pippin.model.weights import Checkpoint
from pippin.recipe import Data, Model, Qat, Quantize, Recipe, Train
from pippin.stages import train as loop
from pippin.stages.qat import qat
from pippin.stages.quantize import quantize

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows and a small quantized model."""
    folder = tmp_path_factory.mktemp("place")
    write_speaking_model(folder / "model", "bfloat16", initializer_range=0.1)
    write_rows(folder / "rows")
    list(quantize(_job(folder, "quantize", "model", folder)))
    return folder


def _job(place: Path, stage: str, model: str, out: Path, **asked: Any) -> Job:
    recipe = Recipe(
        model=Model(source="model", device="cpu", dtype="float32"),
        data=Data(source="rows", max_seq_len=64),
        train=Train(steps=2, row_tokens=64, checkpoint_every=2, spike=0.0),
        quantize=Quantize(method="rtn", bits=3, group_size=32, embed_group_size=32),
        qat=Qat(**{"steps": 6, "learning_rate": 1e-2, **asked}),
        seed=3,
        folder=place,
    )
    origin = Origin(stage=stage, inputs={"model": "m"}, settings=asked, versions={})
    folder, inputs = out / stage, {"model": place / model}
    return Job(stage=stage, recipe=recipe, inputs=inputs, folder=folder, origin=origin)


def _with(engine: str, job: Job) -> Job:
    model = replace(job.recipe.model, engine=engine)
    return replace(job, recipe=replace(job.recipe, model=model))


def _tensors(folder: Path) -> dict[str, Any]:
    checkpoint = Checkpoint(folder)
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


def _losses(folder: Path) -> list[float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["valid_loss"] for row in rows if "valid_loss" in row]


def _press_at(events: Iterator[Event], step: int) -> None:
    for event in events:
        if isinstance(event, Progress) and event.done == step:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("engine", ["torch", pytest.param("mlx", marks=pytest.mark.mlx)])
def test_it_goes_on_bit_for_bit_and_ends_better(place: Path, tmp_path: Path, engine: str) -> None:
    if engine == "mlx":
        pytest.importorskip("mlx.core")
    whole, parts = (
        _with(engine, _job(place, "qat", "quantize", tmp_path / name))
        for name in ("whole", "parts")
    )
    list(qat(whole))
    with pytest.raises(Interrupted, match="after update 3 of 6"):
        _press_at(qat(parts), 3)
    list(qat(parts))
    before, found, again = (
        _tensors(folder) for folder in (place / "quantize", whole.folder, parts.folder)
    )
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor, again[name])
        trained = name.endswith((".scales", ".biases")) and ".layers." in name
        assert np.array_equal(tensor, before[name]) != trained, name
    losses = _losses(whole.folder)
    assert len(losses) == 2
    assert losses[1] < losses[0]
    made = read_manifest(whole.folder)
    assert made is not None
    assert (made["scores"]["steps"], made["scores"]["best_step"]) == (6, 6)


def test_where_validation_prefers_it_nothing_is_changed(
    place: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    found = iter([(1.0, 1), (2.0, 1)])
    monkeypatch.setattr(CodesTrainer, "loss", lambda *_: next(found))
    job = _job(place, "qat", "quantize", tmp_path, steps=2)
    notices = [event.text for event in qat(job) if isinstance(event, Notice)]
    assert "the weights after update 0 are kept: the best validation" in notices
    before, after = _tensors(place / "quantize"), _tensors(job.folder)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        np.testing.assert_array_equal(tensor, after[name])


def test_rows_are_those_after_the_training(place: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Two updates were the training's; the first of these is the third."""
    asked: list[int] = []
    prepare = loop.prepare

    def watched(job: Job) -> Any:
        material = prepare(job)
        take = material.plan.batches
        material.plan.batches = lambda step: (asked.append(step), take(step))[1]
        return material

    monkeypatch.setattr(loop, "prepare", watched)
    monkeypatch.setattr(loop, "shared_share", lambda plan: 0.0)  # which looks at all of an epoch
    list(qat(_job(place, "qat", "quantize", tmp_path, steps=3)))
    assert sorted(set(asked)) == [2, 3, 4]


def test_an_engine_without_it_is_named(place: Path, tmp_path: Path, monkeypatch: Any) -> None:
    engine = SimpleNamespace(load=lambda *_: SimpleNamespace(), peak_memory=lambda: 0)
    monkeypatch.setattr(loop, "open_engine", lambda model: engine)
    job = _job(place, "qat", "quantize", tmp_path)
    with pytest.raises(ModelError, match="engine jax trains no scales"):
        list(qat(_with("jax", job)))
