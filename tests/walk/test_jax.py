"""A whole recipe on JAX beside the same recipe on PyTorch: every stage, every figure."""

import json
import sys

import pytest
from tests.tiny_runs import RECIPE, write_rows, write_speaking_model

from pippin import cli

pytest.importorskip("jax")

pytestmark = [pytest.mark.jax, pytest.mark.torch]

ENGINES = ("jax", "torch")
STAGES = ("base", "adapter", "merged", "quantized")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders of both runs, by engine."""
    folder = tmp_path_factory.mktemp("walk")
    write_speaking_model(folder / "model")
    write_rows(folder / "rows")
    for engine in ENGINES:
        own = RECIPE.replace("[model]", f'[model]\nengine = "{engine}"')
        (folder / f"{engine}.toml").write_text(own)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setattr(sys, "argv", ["pippin", "run", f"{engine}.toml"])
            cli.main()
    return {engine: folder / "runs" / engine for engine in ENGINES}


@pytest.mark.parametrize("stage", STAGES)
def test_figures_are_those_of_pytorch(runs, stage):
    ours, wanted = (
        json.loads((runs[engine] / f"evaluate-{stage}" / "scores.json").read_text())
        for engine in ENGINES
    )
    assert ours["loss"] == pytest.approx(wanted["loss"], abs=1e-3 if stage == "quantized" else 1e-4)
    assert ours["size_bytes"] == wanted["size_bytes"]
    if stage != "quantized":
        assert ours["answers"] == wanted["answers"]


def test_the_trainings_have_the_same_losses(runs):
    """Those of every update, and the validation's."""
    lines = [(runs[e] / "train" / "metrics.jsonl").read_text().splitlines() for e in ENGINES]
    ours, wanted = ([json.loads(line) for line in text] for text in lines)
    assert len(ours) == len(wanted) > 1
    for a, b in zip(ours, wanted, strict=True):
        name = "loss" if "loss" in b else "valid_loss"
        assert a[name] == pytest.approx(b[name], abs=1e-4)
