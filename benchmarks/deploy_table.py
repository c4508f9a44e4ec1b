"""Prints docs/deployed.md's table of the rows that bench_deploy.py saved, the newest of each name.

python benchmarks/deploy_table.py benchmarks/results/FILE.jsonl ...
"""

import json
import sys
from pathlib import Path
from typing import Any

from bench_deploy import NAMES
from pippin.targets import TARGETS

MODELS = {"SmolLM2, a Llama": "", "Qwen 2, tuned": "-qwen2"}
HEAD = (
    "| target | model | prompts of 32 | top-1 | KL | greedy tokens equal | seconds | MB |",
    "|---|---|---|---|---|---|---|---|",
)


def main(paths: list[str]) -> None:
    """The table, a row for a target and a model that was measured."""
    lines = [line for path in paths for line in Path(path).read_text().splitlines()]
    rows = {row["name"]: row for row in map(json.loads, lines)}
    found = [
        line(target, title, rows, suffix)
        for target in TARGETS
        for title, suffix in MODELS.items()
        if f"top1-{NAMES.get(target, target)}{suffix}" in rows
    ]
    print("\n".join([*HEAD, *found]))


def line(target: str, title: str, rows: dict[str, Any], suffix: str) -> str:
    """One target's figures for one model."""
    name = NAMES.get(target, target)
    agreement, notes = (rows[f"top1-{name}{suffix}"][key] for key in ("value", "notes"))
    seconds, megabytes = (
        rows[f"export-{name}-{what}{suffix}"]["value"] for what in ("seconds", "megabytes")
    )
    greedy = f"{notes['greedy_equal']} of {notes['greedy_tokens']}"
    cells = (
        f"`{target}`",
        title,
        str(notes["prompts"]),
        f"{100 * agreement:.1f} %",
        f"{notes['mean_kl']:.2g}",
        greedy,
        f"{seconds:.0f}",
        f"{megabytes:.1f}",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main(sys.argv[1:])
