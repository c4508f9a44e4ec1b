"""Recipe x Machine -> Plan: steps, folders, forecast, and refusals with their numbers."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pippin import artifact
from pippin.check.record import heed
from pippin.engines import missing_package
from pippin.errors import PippinError, Refusal, UsageError
from pippin.figures import bytes_text
from pippin.forecast import Forecast, Need, look
from pippin.machine import Machine
from pippin.model.adapter import refuse_experts
from pippin.model.names import CONFIG
from pippin.model.weights import Checkpoint
from pippin.recipe import Recipe
from pippin.steps import Step, make_steps, model_folder, run_folder
from pippin.ways import Way, fastest_fits, kinds_that_fit

EXTRA_DISK = 1.05  # a new folder stands beside the old one until it is complete


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Everything a run will do, in order. `folder` is the run's own, `model` the model's.

    `needs` by step name are empty while the model is only on the hub; `refusals` say why the run
    cannot start; `updates` of training where the rows were counted; `notices` what a device check
    changed in the recipe; `ways` how else it can be trained there, the fastest of each kind first.
    """

    recipe: Recipe
    machine: Machine
    folder: Path
    model: Path
    device: str
    dtype: str
    steps: tuple[Step, ...]
    needs: dict[str, Need]
    refusals: tuple[Refusal, ...]
    updates: int | None = None
    notices: tuple[str, ...] = ()
    ways: tuple[Way, ...] = ()

    def raise_refusals(self) -> None:
        """Raise PippinError with every refusal."""
        if self.refusals:
            messages, hints = zip(*self.refusals, strict=True)
            raise PippinError("\n".join(messages), "; ".join(dict.fromkeys(hints)))

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer update, padding included."""
        train = self.recipe.train
        return train.row_tokens * train.batch_rows * train.accumulate


def make_plan(recipe: Recipe, machine: Machine, updates: int | None = None) -> Plan:
    """The plan of a recipe on a machine; `updates` of training, where the rows were counted.

    Raises UsageError for a device or an engine that is not here, ModelError for a model's source
    that is nothing.
    """
    _require(recipe, machine)
    notices: tuple[str, ...] = ()
    if not machine.elsewhere:
        device = machine.device(recipe.model.device, recipe.model.engine)
        recipe, notices = heed(recipe, device)
        if machine.lacking and recipe.model.device == "auto":
            notices += (f"computes on the CPU, as the GPU cannot be used: {machine.lacking}",)
    steps, model = make_steps(recipe), model_folder(recipe)
    facts = look(recipe, model)
    updates = updates or recipe.train.steps
    forecast = None
    if facts:
        forecast = Forecast(
            recipe=recipe,
            machine=machine,
            facts=facts,
            updates=updates,
            evaluates=not _evaluated(steps),
        )
    return Plan(
        recipe=recipe,
        machine=machine,
        folder=run_folder(recipe),
        model=model,
        device=machine.device(recipe.model.device, recipe.model.engine),
        dtype=forecast.train_dtype if forecast else recipe.model.dtype,
        steps=steps,
        needs={step.name: forecast.need(step) for step in steps} if forecast else {},
        refusals=tuple(_refusals(forecast, steps)) if forecast else (),
        updates=updates,
        notices=notices,
        ways=_ways(forecast, steps) if forecast else (),
    )


def _ways(forecast: Forecast, steps: tuple[Step, ...]) -> tuple[Way, ...]:
    """What fits in the memory that training may take."""
    train = [step for step in steps if step.stage == "train"]
    return tuple(kinds_that_fit(forecast, _free_memory(forecast, train[0]))) if train else ()


def _evaluated(steps: tuple[Step, ...]) -> bool:
    """Whether the base's evaluation is on disk: then training has the process to itself."""
    base = [step for step in steps if step.name == "evaluate-base"]
    return all(artifact.read_manifest(step.folder) is not None for step in base)


def _require(recipe: Recipe, machine: Machine) -> None:
    engine, device = recipe.model.engine, recipe.model.device
    if engine not in machine.engines:
        raise UsageError(
            f"engine {engine} is not installed",
            f"pip install 'pippin[{engine}]', or another engine",
        )
    if lacking := missing_package(engine):
        raise UsageError(
            f"engine {engine} needs the package {lacking}, which is not installed",
            f"pip install 'pippin[{engine}]', or another engine",
        )
    here = machine.devices(engine)
    if device not in ("auto", *here):
        why = f": {machine.lacking}" if machine.lacking else ""
        raise UsageError(
            f"model.device {device} is not on this machine for engine {engine} "
            f"({machine.chip}){why}",
            f"it has {', '.join(here)}; auto picks the best",
        )


def _refusals(forecast: Forecast, steps: tuple[Step, ...]) -> Iterator[Refusal]:
    recipe, model = forecast.recipe, model_folder(forecast.recipe)
    trains_adapter = recipe.train.method == "lora" and recipe.model.adapter is None
    if trains_adapter and (model / CONFIG).is_file():
        found = refuse_experts(Checkpoint(model), recipe.lora)
        yield from [found] if found else []
    todo = [step for step in steps if artifact.read_manifest(step.folder) is None]
    for step in todo:
        need, free = forecast.need(step).memory, _free_memory(forecast, step)
        if need > free and (step.stage != "evaluate" or step.subject == "base"):
            message = f"{step.name} needs about {bytes_text(need)} of memory, {free_text(free)}"
            yield message, _fitting(forecast, step, free)
    if forecast.machine.elsewhere:
        return
    disk = int(EXTRA_DISK * sum(forecast.need(step).disk for step in todo))
    folder = run_folder(forecast.recipe)
    free = shutil.disk_usage(_existing(folder)).free
    if disk > free:
        yield (
            f"the run needs about {bytes_text(disk)} of disk in {folder}, {free_text(free)}",
            "free some, or set `out` to a folder on a larger disk",
        )


def free_text(count: int) -> str:
    """`1.20 GB are free`."""
    return f"{bytes_text(count)} are free"


def _free_memory(forecast: Forecast, step: Step) -> int:
    """What the step may take: the accelerator's memory where it computes, else the host's."""
    machine = forecast.machine
    trains = step.stage in ("train", "qat")
    computes = trains or (step.stage == "evaluate" and "bundle" not in step.inputs)
    if computes and forecast.device != "cpu" and machine.accelerator:
        return machine.accelerator.memory_available
    return machine.memory_available


def _fitting(forecast: Forecast, step: Step, free: int) -> str:
    """The nearest thing that fits."""
    if step.stage == "train" and (way := fastest_fits(forecast, free)):
        return f"set {way.keys}: about {bytes_text(way.memory)}"
    if step.stage == "qat":
        return "lower train.batch_rows or train.row_tokens, or set qat.steps = 0"
    if step.stage == "evaluate":
        return "lower evaluate.batch_rows, or close other programs"
    return "choose a smaller model, or a machine with more memory"


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder
