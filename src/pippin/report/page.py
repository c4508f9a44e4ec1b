"""Writes report.html: one file with everything in it, readable on a phone, light and dark."""

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from pippin import __version__, artifact
from pippin.data.beginnings import WORTH_TELLING
from pippin.disk import disk_errors
from pippin.figures import bytes_text, duration_text
from pippin.recipe import Recipe
from pippin.report.charts import Chart, line_chart
from pippin.report.table import (
    COLUMNS,
    PARTITION,
    answers_table,
    partition_line,
    partition_table,
    read_all_scores,
    read_json,
    summary_table,
)
from pippin.report.verdicts import headline, verdicts
from pippin.steps import merges

REPORT = "report.html"
STAGES = (
    *("model", "evaluate-base", "train", "evaluate-adapter", "merge", "evaluate-merged"),
    *("quantize", "qat", "evaluate-quantized", "deploy-*", "evaluate-deployed-*"),
)
HEX = 12
# A budget's chart shows the curve's bend: KL up to so many times what was chosen, and down to a
# share of it.
_MOST, _LEAST = 6, 1 / 36


def write_report(run_folder: Path, title: str, recipe: Recipe) -> Path:
    """Write the report of what a run has made so far; the path of the page.

    Stages that are not there are left out. The page refers to nothing outside itself.
    """
    scores = read_all_scores(run_folder)
    found = verdicts(scores, recipe.gates, merges(recipe))
    page = _template().render(
        title=title,
        version=__version__,
        head=headline(found),
        verdicts=found,
        columns=COLUMNS,
        partition=PARTITION,
        rows=summary_table(run_folder, recipe.gates),
        topk=next((s["topk"] for s in scores.values() if "topk" in s), None),
        prompts=answers_table(run_folder),
        samples=list(_samples(scores)),
        charted=_charted(run_folder, recipe),
        bundles=[_bundle(path) for path in sorted(run_folder.glob("deploy-*/deploy.json"))],
        settings=_settings(recipe),
        versions=_versions(run_folder),
        chain=[s for s in _chain(run_folder) if recipe.qat.steps or s["name"] != "qat"],
    )
    path = run_folder / REPORT
    with disk_errors(path):
        path.write_text(page, encoding="utf-8")
    return path


def _template() -> Any:
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.jinja")


def _samples(scores: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Held-out questions in order, each with the answer of every stage."""
    questions: dict[str, dict[str, Any]] = {}
    for stage, measured in scores.items():
        for sample in measured.get("samples", ()):
            entry = questions.setdefault(sample["where"], {**sample, "answers": []})
            entry["answers"].append((stage, sample["answer"], sample["equal"]))
    yield from questions.values()


def _charted(run_folder: Path, recipe: Recipe) -> dict[str, list[Chart]]:
    """Charts under their headings."""
    scales = run_folder / "qat" / "metrics.jsonl"
    found = {
        "Training": list(_charts(run_folder / "train" / "metrics.jsonl")),
        "Bits shared out": list(_budget(run_folder)),
        # Those of an earlier recipe may still lie there.
        "Training of the scales": list(_charts(scales)) if recipe.qat.steps else [],
    }
    return {heading: charts for heading, charts in found.items() if charts}


def _charts(metrics: Path) -> Iterator[Chart]:
    """Loss, learning rate and memory over the updates, as far as training recorded them."""
    rows = list(_json_lines(metrics))
    manifest = artifact.read_manifest(metrics.parent) or {"scores": {}}
    shared = manifest["scores"].get("shared", 0.0)
    beginnings = f" ({shared:.0%} of them shared beginnings)" if shared >= WORTH_TELLING else ""
    curves = {
        "Loss, nats a token": {"training": "loss", "validation": "valid_loss"},
        "Learning rate": {"learning rate": "learning_rate"},
        "Memory, GB": {"process": "memory_bytes"},
        f"Speed, tokens a second{beginnings}": {"training": "tokens_per_second"},
    }
    for title, names in curves.items():
        scale = 1e-9 if "GB" in title else 1.0
        points = {name: _points(rows, key, scale) for name, key in names.items()}
        if chart := line_chart(title, "update", points):
            yield chart


def _budget(run_folder: Path) -> Iterator[Chart]:
    """Where bits were shared out: the curve of size against KL, and the place that was chosen."""
    made = read_json(run_folder / "quantize" / "quantize.json").get("budget")
    if made is None:
        return
    chosen = (made["size_bytes"] / 1e6, made["expected_kl"])
    curve = [(size / 1e6, kl) for size, kl in made["curve"]]
    near = [point for point in curve if _LEAST * chosen[1] < point[1] < _MOST * chosen[1]]
    title = "Expected KL by size, nats a token"
    if chart := line_chart(title, "MB of weights", {"other sizes": near, "chosen": [chosen]}):
        yield chart


def _points(rows: list[dict[str, Any]], key: str, scale: float) -> list[tuple[float, float]]:
    return [(row["step"], row[key] * scale) for row in rows if row.get(key) is not None]


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a metrics file; a last line that was cut off is none."""
    if not path.is_file():
        return
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "step" in row:
            yield row


def _bundle(path: Path) -> dict[str, Any]:
    """A deployed bundle: its name, and lists of (name, value) under headings."""
    said = read_json(path)
    files = [p for p in sorted(path.parent.iterdir()) if p.name != artifact.MANIFEST]
    facts = {k: v for k, v in said.items() if isinstance(v, str | int | float)}
    check = dict(said.get("check") or {})
    lists = {
        "Every layer against PyTorch": check.pop("layers", None),
        "Checked against the quantized model": check or None,
        "Facts": {k: v for k, v in facts.items() if k not in ("parent", "size_bytes")},
    }
    shown = {"Files": [(file.name, bytes_text(_size(file))) for file in files]}
    shown |= {head: _facts(found) for head, found in lists.items() if isinstance(found, dict)}
    operators = partition_table(said)
    line = partition_line(said) if operators else ""
    return {"name": path.parent.name, "lists": shown, "operators": operators, "line": line}


def _size(path: Path) -> int:
    return artifact.size(path) if path.is_dir() else path.stat().st_size


def _facts(found: dict[str, Any]) -> list[tuple[str, str]]:
    return [(k.replace("_", " "), _fact(k, v)) for k, v in found.items() if v is not None]


def _fact(name: str, value: Any) -> str:
    if name.endswith("speed"):
        return f"{value:.3g} tokens/s"
    if name.endswith("seconds"):
        return duration_text(value)
    if isinstance(value, float):
        return f"{100 * value:.1f}%" if name.endswith("top1") else f"{value:.4g}"
    return str(value)


def _settings(recipe: Recipe) -> list[tuple[str, list[tuple[str, str]]]]:
    """(table, [(key, value)]) of the recipe, its own keys first."""
    tables = [(f.name, getattr(recipe, f.name)) for f in fields(recipe) if f.name != "folder"]
    own = [(name, _value(value)) for name, value in tables if not is_dataclass(value)]
    return [("recipe", own), *((name, _keys(v)) for name, v in tables if is_dataclass(v))]


def _keys(table: Any, prefix: str = "") -> list[tuple[str, str]]:
    found = []
    for key in fields(table):
        value = getattr(table, key.name)
        if is_dataclass(value):
            found += _keys(value, f"{key.name}.")
        else:
            found.append((prefix + key.name, _value(value)))
    return found


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "not set" if value is None or value == "" else str(value)


def _manifests(run_folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for pattern in STAGES:
        for folder in sorted(run_folder.glob(pattern)):
            if manifest := artifact.read_manifest(folder):
                yield folder, manifest


def _versions(run_folder: Path) -> list[tuple[str, str]]:
    """Every package a stage was computed with; several versions where stages differ."""
    found: dict[str, set[str]] = {}
    for _, manifest in _manifests(run_folder):
        for package, version in manifest.get("versions", {}).items():
            found.setdefault(package, set()).add(version)
    return [(package, ", ".join(sorted(found[package]))) for package in sorted(found)]


def _chain(run_folder: Path) -> Iterator[dict[str, Any]]:
    """Each stage with the digest of its manifest and those of its inputs, by the stages' names."""
    stages = [(f, m, artifact.digest(f)) for f, m in _manifests(run_folder)]
    named = {digest: folder.name for folder, _, digest in stages}
    for folder, manifest, digest in stages:
        inputs = [
            (role, named.get(value), value[:HEX])
            for role, value in manifest.get("inputs", {}).items()
        ]
        yield {"name": folder.name, "digest": digest[:HEX], "inputs": inputs}
