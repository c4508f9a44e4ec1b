"""Deploy asks the target first, writes whole or not at all, and names a package that is missing."""

import json
from pathlib import Path

import pytest

from pippin import targets
from pippin.artifact import Origin, read_manifest
from pippin.errors import PippinError
from pippin.events import Finished, Metric, Started
from pippin.job import Job
from pippin.recipe import Data, Deploy, Model, Recipe
from pippin.stages import loading
from pippin.stages.deploy import deploy


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
    monkeypatch.setattr(loading, "load_target", lambda name: found)
    return found


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
