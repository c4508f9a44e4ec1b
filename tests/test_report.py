"""The report is one page that holds every figure, escapes every text, and needs no network."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pippin import artifact
from pippin.artifact import Origin
from pippin.recipe import Data, Gate, Gates, Model, Recipe
from pippin.report import COLUMNS, answers_table, summary_table, write_report
from pippin.report.charts import line_chart
from pippin.report.table import byte_text

PROMPT = "table: t1\ncolumns: Player, No.\nQ: Who wears <b>5</b> & 6?"
SUBJECTS = ("base", "adapter", "merged", "quantized", "deployed-executorch")
RECIPE = Recipe(
    model=Model(source="builtin:smollm2"),
    data=Data(source="data/<sql>"),
    gates=Gates(quantized=Gate(max_kl=0.1, min_top1=0.9), deployed=Gate(max_kl=0.01)),
    name="sql",
)
FIGURES = {
    "base": (1.8312, None, None, 0.0, 269_060_000, 16.0, None),
    "adapter": (0.2104, 0.9120, 0.701, 0.72, 288_400_000, 17.15, None),
    "merged": (0.2105, 0.00004, 0.998, 0.72, 269_060_000, 16.0, 0.9999),
    "quantized": (0.2391, 0.0312, 0.951, 0.66, 91_300_000, 5.43, 0.9823),
    "deployed-executorch": (0.2393, 0.0006, 0.994, 0.66, 92_100_000, 5.48, 0.9821),
}


def scores(subject: str, questions: int = 7) -> dict:
    names = ("loss", "kl", "top1", "exact_match", "size_bytes", "bits_per_weight", "gain_kept")
    found = dict(zip(names, FIGURES[subject], strict=True))
    right = subject != "base"
    return {
        "subject": subject,
        "perplexity": 2.718281828 ** found["loss"],
        "topk": 64,
        **found,
        "gates": {"max_kl": 0.1} if subject == "quantized" else {},
        "answers": [{"prompt": PROMPT, "answer": f"answer of {subject} <i>"}],
        "samples": [
            {
                "where": f"test.jsonl:{i + 1}",
                "prompt": PROMPT,
                "answer": "SELECT Player FROM t1 WHERE No. = 5" if right else "The table <shows>",
                "reference": "SELECT Player FROM t1 WHERE No. = 5",
                "equal": right,
            }
            for i in range(questions)
        ],
    }


def make_run(run: Path, subjects=SUBJECTS) -> Path:
    """A run's folder as the stages leave it, without weights."""
    last = "none"
    for name in ("train", "merge", "quantize", "deploy-executorch"):
        _stage(run / name, {"model": last}, _files(name))
        last = artifact.digest(run / name)
    for subject in subjects:
        files = {"scores.json": json.dumps(scores(subject))}
        _stage(run / f"evaluate-{subject}", {"model": last}, files)
    return run


def _files(name: str) -> dict[str, str]:
    if name == "train":
        rows = [
            {
                "step": s,
                "loss": 2.5 * 0.97**s + 0.2,
                "learning_rate": 2e-4 * (1 - s / 100),
                "memory_bytes": 1.1e9 + 4e6 * s,
                "tokens_per_second": 900 + s % 7,
            }
            for s in range(1, 101)
        ]
        rows += [{"step": s, "valid_loss": 2.4 * 0.97**s + 0.25} for s in (25, 50, 75, 100)]
        return {"metrics.jsonl": "\n".join(map(json.dumps, rows)) + '\n{"step": 101, "lo'}
    if name.startswith("deploy"):
        said = {"target": "executorch", "context": 512, "delegation": {"delegated nodes": 2417}}
        return {"deploy.json": json.dumps(said), "model.pte": "x" * 1000}
    return {}


def _stage(folder: Path, inputs: dict[str, str], files: dict[str, str]) -> None:
    origin = Origin(
        stage=folder.name, inputs=inputs, settings={}, versions={"torch": "2.13.0", "numpy": "2.1"}
    )
    with artifact.writing(folder, origin, {}) as partial:
        for name, text in files.items():
            (partial / name).write_text(text)


def test_table_holds_every_figure_as_text(tmp_path):
    rows = summary_table(make_run(tmp_path), RECIPE.gates)
    assert [row["stage"] for row in rows] == list(SUBJECTS)
    assert all(set(row) == set(COLUMNS) for row in rows)
    quantized = rows[3]
    assert quantized == {
        "stage": "quantized",
        "loss": "0.239",
        "perplexity": "1.27",
        "kl": "0.0312",
        "top1": "95.1 %",
        "exact_match": "66 %",
        "size_bytes": "91 MB",
        "bits_per_weight": "5.43",
        "gain_kept": "98.2 %",
        "gates": "passed",
    }
    assert rows[0]["kl"] == rows[0]["gates"] == "\u2013"
