"""A whole recipe on MLX beside the same recipe on PyTorch: every stage, every figure."""

import json
import sys

import pytest
from tests.tiny_runs import RECIPE, write_rows, write_speaking_model

from pippin import cli

pytest.importorskip("mlx.core")

pytestmark = [pytest.mark.mlx, pytest.mark.torch, pytest.mark.executorch]

DEPLOYING = {
    "targets = []": 'targets = ["executorch"]\ncontext = 64',
    'method = "rtn"\nbits = 8\ngroup_size = 32\nembed_group_size = 32': (
        'method = "best"\nbits = 8\ngroup_size = 0\nscheme = "symmetric"\n'
        'embed_group_size = 0\nembed_scheme = "symmetric"'
    ),
}
STAGES = ("base", "adapter", "merged", "quantized", "deployed-executorch")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders of both runs, by engine."""
    folder = tmp_path_factory.mktemp("walk")
    write_speaking_model(folder / "model")
    write_rows(folder / "rows")
    text = RECIPE
    for old, new in DEPLOYING.items():
        assert old in text
        text = text.replace(old, new)
    for engine in ("mlx", "torch"):
        own = text.replace("[model]", f'[model]\nengine = "{engine}"')
        (folder / f"{engine}.toml").write_text(own)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setattr(sys, "argv", ["pippin", "run", f"{engine}.toml"])
            cli.main()
    return {engine: folder / "runs" / engine for engine in ("mlx", "torch")}


def scores(run, stage):
    return json.loads((run / f"evaluate-{stage}" / "scores.json").read_text())


@pytest.mark.parametrize("stage", STAGES[:3])
def test_figures_are_those_of_pytorch(runs, stage):
    ours, wanted = (scores(runs[engine], stage) for engine in ("mlx", "torch"))
    assert ours["loss"] == pytest.approx(wanted["loss"], abs=1e-4)
    assert ours["answers"] == wanted["answers"]
    assert ours["size_bytes"] == wanted["size_bytes"]


def test_the_trainings_have_the_same_losses(runs):
    """Those of every update, and the validation's."""
    lines = [(runs[e] / "train" / "metrics.jsonl").read_text().splitlines() for e in runs]
    ours, wanted = ([json.loads(line) for line in text] for text in lines)
    assert len(ours) == len(wanted) > 3
    for mine, other in zip(ours, wanted, strict=True):
        for name in ("loss", "valid_loss", "learning_rate"):
            assert mine.get(name) == pytest.approx(other.get(name), abs=1e-4)


def test_what_leaves_the_machine_is_what_was_quantized(runs):
    """The file's runtime is ExecuTorch's own, whichever engine came before."""
    quantized, deployed = (scores(runs["mlx"], stage) for stage in STAGES[3:])
    assert deployed["loss"] == pytest.approx(quantized["loss"], abs=0.05)
    assert deployed["top1"] > 0.9
    assert (runs["mlx"] / "report.html").stat().st_size > 10_000
