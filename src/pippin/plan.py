"""Recipe x Machine -> Plan: steps, folders, forecast, and refusals with their numbers."""

from dataclasses import dataclass
from pathlib import Path

from pippin.errors import PippinError
from pippin.machine import Machine
from pippin.recipe import Recipe
from pippin.steps import Step, make_steps, model_folder, run_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Everything a run will do, in order. `folder` is the run's own, `model` the model's.

    `refusals` are (message, hint) pairs; a run starts only where there are none.
    """

    recipe: Recipe
    machine: Machine
    folder: Path
    model: Path
    device: str
    steps: tuple[Step, ...]
    refusals: tuple[tuple[str, str], ...]

    def raise_refusals(self) -> None:
        """Raise PippinError with every refusal."""
        if self.refusals:
            messages, hints = zip(*self.refusals, strict=True)
            raise PippinError("\n".join(messages), "; ".join(dict.fromkeys(hints)))


def make_plan(recipe: Recipe, machine: Machine) -> Plan:
    """The plan of a recipe on a machine."""
    return Plan(
        recipe=recipe,
        machine=machine,
        folder=run_folder(recipe),
        model=model_folder(recipe),
        device=machine.device(recipe.model.device),
        steps=make_steps(recipe),
        refusals=(),
    )
