"""The figures of every measured stage as strings, for the console and the report alike."""

import json
from pathlib import Path
from typing import Any

from pippin.figures import bytes_text, counted
from pippin.recipe import Gate, Gates
from pippin.stages.gates import gate_name, missed

SUBJECTS = ("base", "adapter", "merged", "quantized")
NONE = "\u2013"
# key of a row: (heading, decimals, unit)
_FIGURES = {
    "rows": ("held-out rows", 0, ""),
    "loss": ("held-out loss", 3, ""),
    "perplexity": ("perplexity", 2, ""),
    "kl": ("KL to parent", 4, ""),
    "top1": ("top-1", 1, "%"),
    "exact_match": ("exact match", 0, "%"),
    "size_bytes": ("size", 0, "B"),
    "bits_per_weight": ("bits/weight", 2, ""),
    "gain_kept": ("gain kept", 1, "%"),
}
# Of the operators that a delegate took, or left: key and heading.
PARTITION = {
    "operator": "operator",
    "delegated": "delegated",
    "left": "left",
    "share": "arithmetic",
    "why": "why it stayed",
}
COLUMNS = {"stage": "stage", **{key: f[0] for key, f in _FIGURES.items()}, "gates": "gates"}


def summary_table(run_folder: Path, gates: Gates | None = None) -> list[dict[str, str]]:
    """One row for each stage that was measured: a string under every key of COLUMNS.

    `gates` are the recipe's; without them a stage is judged by those it was measured under.
    """
    scores = read_all_scores(run_folder)
    return [_row(name, scores[name], gates) for name in scores]


def answers_table(run_folder: Path) -> list[tuple[str, dict[str, str]]]:
    """(prompt, answer by stage) for each of the recipe's prompts, in their order."""
    table: dict[str, dict[str, str]] = {}
    for name, scores in read_all_scores(run_folder).items():
        for pair in scores.get("answers", ()):
            table.setdefault(pair["prompt"], {})[name] = pair["answer"]
    return list(table.items())


def partition_table(description: dict[str, Any]) -> list[dict[str, str]]:
    """The operators of a deployed program, from its deploy.json; empty where it has no report."""
    return [
        {**row, "delegated": str(row["delegated"]), "left": str(row["left"]), "share": _share(row)}
        for row in description.get("delegation", {}).get("operators", ())
    ]


def partition_line(description: dict[str, Any]) -> str:
    """How much of a program its delegate took, in a sentence."""
    report = description["delegation"]
    return (
        f"{report['delegate']} computes {100 * report['flops_share']:.1f}% of the arithmetic, "
        f"in {counted(report['subgraphs'], 'piece')}"
    )


def _share(row: dict[str, Any]) -> str:
    return f"{100 * row['share']:.1f}%" if row["share"] else NONE


def read_all_scores(run_folder: Path) -> dict[str, dict[str, Any]]:
    """scores.json of every measured stage of a run by subject, in the order of the stages."""
    deployed = sorted(
        p.name.removeprefix("evaluate-") for p in run_folder.glob("evaluate-deployed*")
    )
    read = {
        name: read_json(run_folder / f"evaluate-{name}" / "scores.json")
        for name in (*SUBJECTS, *deployed)
    }
    return {name: scores for name, scores in read.items() if scores}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is none that can be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def gate_for(subject: str, scores: dict[str, Any], gates: Gates | None) -> Gate:
    """The limits a stage is judged by; the base has none."""
    if gates is not None:
        return getattr(gates, gate_name(subject), Gate())
    return Gate(**scores.get("gates", {}))


def figure(key: str, value: float | None) -> str:
    """A score as people read it."""
    if value is None:
        return NONE
    _, decimals, unit = _FIGURES[key]
    if unit == "B":
        return bytes_text(value)
    if unit == "%":
        return f"{100 * value:.{decimals}f}%"
    if isinstance(value, int):
        return str(value)
    if 0 < abs(value) < 5 * 10.0**-decimals:
        return f"{value:.0e}"
    return f"{value:.{decimals}f}"


def _row(name: str, scores: dict[str, Any], gates: Gates | None) -> dict[str, str]:
    figures = {key: figure(key, scores.get(key)) for key in _FIGURES}
    gate = gate_for(name, scores, gates)
    judged = NONE if gate == Gate() else "missed" if missed(scores, gate) else "passed"
    return {"stage": name, **figures, "gates": judged}
