"""What a stage is given: the recipe, the folders it reads, and the folder it writes."""

from dataclasses import dataclass
from pathlib import Path

from pippin.artifact import Origin
from pippin.recipe import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One step of a plan.

    `inputs` by role: `model` a Hugging Face folder, `adapter` a PEFT folder and `trained_on` its
    base where that is `model` in fewer bits, `bundle` a deployed one, `calibration` a file of rows,
    `parent` the evaluation of what this was made from, `base` and `tuned` the evaluations that
    bracket the adapter's gain. `subject` names what is evaluated (base, adapter, merged, quantized,
    deployed) or the target that is deployed to. `memory` is the plan's peak in bytes, where there
    is one.
    """

    stage: str
    recipe: Recipe
    inputs: dict[str, Path]
    folder: Path
    origin: Origin
    subject: str = ""
    memory: int | None = None
