"""Ways to quantize one model side by side, each measured as the recipe's own folder would be."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pippin.errors import PippinError
from pippin.events import Event, Notice
from pippin.lock import locked
from pippin.plan import Plan
from pippin.quantizers import CALIBRATED, QUANTIZERS
from pippin.recipe import BUDGETS, Gate, Gates, Quantize, Recipe
from pippin.recipe_limits import contradictions
from pippin.run import Walk
from pippin.stages.evaluate import read_scores
from pippin.stages.quantize import REPORT
from pippin.stages.together import leading
from pippin.steps import Step, make_steps

FOLDER = "compare"
# Each way is shown, however little it keeps.
NO_GATES = Gates(quantized=Gate())
# What the table shows of a way, in this order.
FIGURES = ("kl", "top1", "perplexity", "exact_match", "bits_per_weight", "size_bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way: its name, the recipe that takes it, and the steps that make and measure it."""

    name: str
    recipe: Recipe
    steps: tuple[Step, Step]


def compare(plan: Plan, bits: Sequence[int]) -> Iterator[Event]:
    """Quantize by every method to every number of `bits`, and measure each folder.

    What is there already stays. Raises PippinError where the model to quantize is not there yet.
    """
    plan.raise_refusals()
    with leading(plan.recipe.model), locked(plan.folder):
        for way in ways(plan, bits):
            if isinstance(way, Notice):
                yield way
                continue
            changed = replace(plan, recipe=way.recipe, steps=(*plan.steps, *way.steps))
            walk = Walk(plan=changed, redo=frozenset())
            for step in way.steps:
                missing = walk.missing(step)
                if missing is not None:
                    raise PippinError(
                        f"{step.name} needs {missing.folder}, which is not there",
                        "`pippin run RECIPE` first",
                    )
                yield from walk.step(step)


def ways(plan: Plan, bits: Sequence[int]) -> Iterator[Way | Notice]:
    """Every method at every number of bits; a Notice for one that the recipe's scheme rules out."""
    own = plan.recipe.quantize
    for method in QUANTIZERS:
        for number in bits:
            name = f"{method}-{number}"
            made: Any = {"method": method, "bits": number, **dict.fromkeys(BUDGETS)}
            if method not in CALIBRATED:
                made |= {"calibration": None, "recover_tokens": 0, "recover_passes": 1}
            if method != "gptq":
                made["sequential"] = False
            settings: Quantize = replace(own, **made)
            recipe = replace(plan.recipe, quantize=settings, gates=NO_GATES)
            wrong = [text for key, text, _ in contradictions(recipe) if key[0] == "quantize"]
            if wrong:
                yield Notice(stage="quantize", text=f"{name} left out: {wrong[0]}")
            else:
                yield Way(name=name, recipe=recipe, steps=_steps(plan, recipe, name))


def _steps(plan: Plan, recipe: Recipe, name: str) -> tuple[Step, Step]:
    """The recipe's own two steps, in a folder of the way's own."""
    by_name = {step.name: step for step in make_steps(recipe)}
    folder = plan.folder / FOLDER / name
    made = replace(by_name["quantize"], name=f"quantize {name}", folder=folder / "quantize")
    measured = by_name["evaluate-quantized"]
    return made, replace(
        measured,
        name=f"evaluate {name}",
        folder=folder / "evaluate",
        inputs={**measured.inputs, "model": made.folder},
    )


def comparison(run_folder: Path) -> list[dict[str, Any]]:
    """A row for each way that was measured, the nearest to its parent first: FIGURES by name."""
    rows = []
    for folder in sorted((run_folder / FOLDER).glob("*")):
        scores = read_scores(folder / "evaluate")
        if scores is not None:
            made = json.loads((folder / "quantize" / REPORT).read_text())
            figures = {key: scores.get(key) for key in FIGURES}
            rows.append({"way": folder.name, **figures, "seconds": made["seconds"]})
    return sorted(rows, key=lambda row: row["kl"])
