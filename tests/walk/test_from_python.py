"""The page on Python does what it says: its code is run, over a run that is there."""

import re
from pathlib import Path

import pytest
from tests.tiny_runs import RECIPE, write_rows, write_speaking_model

from pippin.stages.evaluate import read_scores

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "from-python.md"


@pytest.mark.torch
def test_the_page_runs(tmp_path, monkeypatch):
    write_speaking_model(tmp_path / "model")
    write_rows(tmp_path / "rows")
    (tmp_path / "mine.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL))
    said: dict = {}
    exec(compile(code, str(PAGE), "exec"), said)
    assert said["scores"] == read_scores(tmp_path / "runs" / "mine" / "evaluate-quantized")
    assert [one["where"] for one in said["answers"]] == ["test.jsonl:1", "test.jsonl:2"]
    found = said["model"].logprobs(said["tokens_1T"])
    assert found.shape == (1, said["tokens_1T"].shape[1] - 1)
    assert (found < 0).all()
