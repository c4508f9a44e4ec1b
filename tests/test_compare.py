"""Every method side by side on a small model that speaks, each measured against the merged one."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pippin import run as running
from pippin.commands import pippin
from pippin.compare import FIGURES, compare, comparison
from pippin.errors import PippinError
from pippin.events import Finished, Notice
from pippin.plan import make_plan
from pippin.quantizers import QUANTIZERS
from pippin.run import run
from tests.tiny_runs import (
    MACHINE,
    change,
    fake_stage,
    make_recipe,
    write_rows,
    write_speaking_model,
)

RECIPE = """
[model]
source = "model"
dtype = "float32"
device = "cpu"
[data]
source = "rows"
max_seq_len = 64
[lora]
rank = 2
[train]
steps = 1
row_tokens = 64
[quantize]
group_size = 32
scheme = "affine"
embed_group_size = 32
embed_scheme = "affine"
calibration_tokens = 100
[evaluate]
rows = 2
generate_rows = 1
max_tokens = 2
[gates.quantized]
min_gain_kept = 0.0
[deploy]
targets = []
"""


@pytest.mark.torch
def test_methods_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    write_speaking_model(tmp_path / "model")
    write_rows(tmp_path / "rows")
    (tmp_path / "tiny.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    early = CliRunner().invoke(pippin, ["quantize", "tiny.toml", "--compare", "4"])
    assert isinstance(early.exception, PippinError)
    whole = CliRunner().invoke(pippin, ["run", "tiny.toml", "--json"])
    assert whole.exit_code == 0, whole.output
    asked = ["quantize", "tiny.toml", "--compare", "3", "--compare", "8", "--json"]
    found = CliRunner().invoke(pippin, asked)
    assert found.exit_code == 0, found.output
    rows = json.loads(found.output.splitlines()[-1])["rows"]
    assert {row["way"] for row in rows} == {f"{m}-{b}" for m in QUANTIZERS for b in (3, 8)}
    divergences = {row["way"]: row["kl"] for row in rows}
    assert list(divergences.values()) == sorted(divergences.values())
    assert divergences["best-8"] < divergences["best-3"]
    for row in rows:
        folder = tmp_path / "runs" / "tiny" / "compare" / row["way"]
        scores = json.loads((folder / "evaluate" / "scores.json").read_text())
        assert {key: row[key] for key in FIGURES} == {key: scores[key] for key in FIGURES}
        assert row["seconds"] > 0
    table = CliRunner().invoke(pippin, [*asked[:-1], "--quiet"])
    assert "best-8" in table.output
    assert "top-1" in table.output


def test_what_is_there_stays_and_what_cannot_be_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "stage_function", fake_stage)
    recipe = change(make_recipe(tmp_path), quantize={"scheme": "symmetric"})
    plan = make_plan(recipe, MACHINE)
    with pytest.raises(PippinError, match="quantize awq-4 needs"):
        list(compare(plan, [4]))
    list(run(plan))
    first, again = list(compare(plan, [4])), list(compare(plan, [4]))
    texts = [e.text for e in first if isinstance(e, Notice)]
    assert any(text.startswith("hqq-4 left out") for text in texts)
    assert not any(e.skipped for e in first if isinstance(e, Finished))
    assert all(e.skipped for e in again if isinstance(e, Finished))


def test_nothing_measured_gives_no_rows(tmp_path: Path) -> None:
    assert comparison(tmp_path) == []
