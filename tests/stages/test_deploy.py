"""Deploy asks the target first, writes whole or not at all, and names a package that is missing."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.targets.tiny_quantized import write_folder
from tests.tiny_runs import change, make_recipe

from pippin import targets
from pippin.artifact import Origin, read_manifest
from pippin.errors import PippinError
from pippin.events import Finished, Metric, Progress, Started
from pippin.job import Job
from pippin.recipe import Data, Deploy, Model, Recipe
from pippin.stages import loading
from pippin.stages.deploy import deploy
from pippin.steps import make_steps


class FakeTarget:
    """Writes one file; refuses or breaks where told."""

    def __init__(self, refused=None, error=None):
        self.refused, self.error, self.bundles = refused, error, []

    def refusal(self, quantize, checkpoint):
        return self.refused

    def write(self, bundle):
        self.bundles.append(bundle)
        (bundle.folder / "model.bin").write_bytes(b"x" * 100)
        yield Metric(stage="deploy", step=0, values={"nodes": 7.0})
        if self.error:
            raise self.error


@pytest.fixture
def target(monkeypatch):
    found = FakeTarget()
    use(monkeypatch, found)
    return found


def use(monkeypatch, target: FakeTarget) -> None:
    """It is what every target's name stands for; it reads no folder, so there is none."""
    monkeypatch.setattr(loading, "load_target", lambda name: target)
    monkeypatch.setattr("pippin.stages.deploy.require_sound", lambda folder: None)


def make_job(tmp_path: Path, subject="executorch") -> Job:
    return Job(
        stage="deploy",
        recipe=Recipe(model=Model(source="m"), data=Data(source="d"), deploy=Deploy(context=99)),
        inputs={"model": tmp_path / "quantize"},
        folder=tmp_path / "deploy-executorch",
        origin=Origin(stage="deploy", inputs={"model": "1"}, settings={}, versions={}),
        subject=subject,
    )


def test_the_target_writes_into_the_stage_folder(tmp_path, target):
    job = make_job(tmp_path)
    events = list(deploy(job))
    assert isinstance(events[0], Started)
    assert events[1] == Metric(stage="deploy", step=0, values={"nodes": 7.0})
    assert isinstance(events[-1], Finished)
    assert events[-1].summary["size_bytes"] == 100
    assert (job.folder / "model.bin").stat().st_size == 100
    assert read_manifest(job.folder)["scores"] == {"size_bytes": 100}
    (bundle,) = target.bundles
    assert (bundle.quantized, bundle.context) == (tmp_path / "quantize", 99)
    assert bundle.folder != job.folder


def test_a_refusal_comes_before_any_file(tmp_path, target):
    target.refused = ("too wide", "make it narrow")
    with pytest.raises(PippinError, match="too wide") as caught:
        list(deploy(make_job(tmp_path)))
    assert caught.value.hint == "make it narrow"
    assert target.bundles == []
    assert not (tmp_path / "deploy-executorch").exists()


def test_a_failure_leaves_nothing_behind(tmp_path, target):
    target.error = PippinError("lowering failed", "lower the context")
    with pytest.raises(PippinError, match="lowering failed"):
        list(deploy(make_job(tmp_path)))
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_names_the_extra(tmp_path, target):
    target.error = ModuleNotFoundError("No module named 'executorch.exir'", name="executorch.exir")
    with pytest.raises(PippinError, match="needs the package executorch") as caught:
        list(deploy(make_job(tmp_path)))
    assert caught.value.hint == 'pip install "pippin[deploy]"'


def test_a_module_of_ours_that_is_missing_is_our_fault(tmp_path, target):
    target.error = ModuleNotFoundError("No module named 'pippin.x'", name="pippin.x")
    with pytest.raises(ModuleNotFoundError):
        list(deploy(make_job(tmp_path)))


def test_a_target_that_cannot_be_imported_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(targets.TARGETS, "executorch", "no_such_framework.target")
    with pytest.raises(PippinError, match="needs the package no_such_framework"):
        list(deploy(make_job(tmp_path)))


def test_a_bundle_says_which_target_made_it(tmp_path):
    (tmp_path / "deploy.json").write_text(json.dumps({"target": "executorch", "context": 128}))
    assert loading.target_of(tmp_path) == "executorch"
    assert loading.context_of({"bundle": tmp_path}) == 128


@pytest.mark.parametrize("text", ["{", "[]", '{"target": "toaster"}'])
def test_a_strange_bundle_is_refused(tmp_path, text):
    (tmp_path / "deploy.json").write_text(text)
    with pytest.raises(PippinError, match="is no bundle of a target known here"):
        loading.target_of(tmp_path)


def test_two_targets_are_made_of_one_quantized_model(tmp_path):
    steps = make_steps(change(make_recipe(tmp_path), deploy={"targets": ("gguf", "mlx")}))
    assert [step.stage for step in steps].count("quantize") == 1
    made = {step.subject: step.inputs["model"] for step in steps if step.stage == "deploy"}
    assert made["gguf"] == made["mlx"]
    assert made.keys() == {"gguf", "mlx"}


@pytest.mark.parametrize("name", sorted(targets.TARGETS))
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, name):
    fake = FakeTarget(error=ModuleNotFoundError("No module named 'x.y'", name="x.y"))
    use(monkeypatch, fake)
    with pytest.raises(PippinError, match=f"target {name} needs the package x") as caught:
        list(deploy(make_job(tmp_path, name)))
    assert caught.value.hint == f'pip install "pippin[{targets.EXTRAS[name]}]"'


def test_an_interrupted_export_leaves_nothing(tmp_path, monkeypatch):
    """The real GGUF writer, stopped in the middle of its tensors as Ctrl-C stops it."""
    pytest.importorskip("torch")
    (tmp_path / "quantize").mkdir()
    write_folder(tmp_path / "quantize", "llama", lambda module: None)
    job = make_job(tmp_path, "gguf")
    job = replace(job, recipe=change(job.recipe, quantize={"embed_bits": 16}))
    running = deploy(job)
    for event in running:
        if isinstance(event, Progress) and event.done == 3:
            break
    with pytest.raises(KeyboardInterrupt):
        running.throw(KeyboardInterrupt())
    assert not job.folder.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["quantize"]
