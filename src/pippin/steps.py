"""The steps of a recipe in order: their folders, and what each is made from."""

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from pippin.errors import DataError, UsageError
from pippin.figures import counted
from pippin.model.source import locate, locate_adapter, locate_adapter_base
from pippin.quantizers import CALIBRATED
from pippin.recipe import BUDGETS, DEVICE_ONLY, TABLES, Recipe

# Keys that never change what a stage makes: how often work is saved, how memory is spared, when to
# give up. Changing them must not throw a finished training away. Gates are in no slice at all: they
# judge a measurement and do not alter it, so a changed gate is checked again without measuring.
HARMLESS = {
    "data.source",  # where the files lie: their digest is an input of every stage that reads them
    "data.test",
    "data.valid",
    "model.attention",
    "model.adapter",  # the same: the digest of its files counts
    "model.adapter_base",
    "model.device",
    "model.revision",
    "model.source",  # the same: the digest of its files counts
    "model.trust_remote_code",
    "quantize.calibration",  # the same
    "train.checkpoint_every",
    "train.compile",
    "train.gradient_checkpointing",
    "train.keep_checkpoints",
    "train.recomputed_layers",
    "train.spike",
}


# Why a recipe may lack a stage, as the way to have it.
WHY_NOT = {
    "train": "it merges model.adapter as it is: leave that out to train one",
    "merge": "train.method = full and quantize.one_pass merge nothing on the way",
    "qat": "set qat.steps",
    "deploy": "name formats in deploy.targets, or with --target",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One stage of the run.

    `inputs` by role are folders (see Job); `settings` is the slice of the recipe that the stage
    depends on, flat: changing anything else leaves the stage finished.
    """

    name: str
    stage: str
    title: str
    folder: Path
    inputs: dict[str, Path]
    settings: dict[str, Any]
    subject: str = ""
    reads_data: bool = False


def make_steps(recipe: Recipe) -> tuple[Step, ...]:
    """Everything a run of the recipe does, in order.

    Raises ModelError where the model's source is nothing that could be fetched or used, or its
    adapter is not there; DataError where a file for calibration is not; UsageError for a run that
    would change what it reads.
    """
    run, model = run_folder(recipe), model_folder(recipe)
    for given in (model, adapter_folder(recipe), locate_adapter_base(recipe.model, recipe.folder)):
        if given and run.resolve().is_relative_to(given.resolve()):
            raise UsageError(
                f"the run's folder {run} lies in {given}, which would change with every stage",
                "give another `out`: what a run reads must stay as it is",
            )
    fetch = () if model != run / "model" else (_fetch(recipe, model),)
    return (*fetch, *_steps(recipe, run, model))


def run_folder(recipe: Recipe) -> Path:
    """Where the run's stages live; relative to the current folder."""
    return Path(recipe.out).expanduser() if recipe.out else Path("runs") / recipe.name


def model_folder(recipe: Recipe) -> Path:
    """The model in Hugging Face's format: a local folder in place, or where it is fetched to."""
    found = locate(recipe.model, recipe.folder)
    return run_folder(recipe) / "model" if found.needs_fetch else Path(found.location)


def adapter_folder(recipe: Recipe) -> Path:
    """The adapter: the recipe's own, or the one that training makes."""
    return locate_adapter(recipe.model, recipe.folder) or run_folder(recipe) / "train"


def merges(recipe: Recipe) -> bool:
    """Whether the adapter and its base become a model of their own on the way."""
    return recipe.train.method == "lora" and not recipe.quantize.one_pass


def small_folder(recipe: Recipe) -> Path:
    """The quantized model: as it was rounded, or trained on since."""
    return run_folder(recipe) / ("qat" if recipe.qat.steps else "quantize")


def settings(recipe: Recipe, *tables: str) -> dict[str, Any]:
    """`table.key` -> value for all keys of some tables that change what a stage makes."""
    named = {table: getattr(recipe, table) for table in tables}
    keys = ((t, f.name) for t, values in named.items() for f in fields(values))
    return {f"{t}.{k}": getattr(named[t], k) for t, k in keys if f"{t}.{k}" not in HARMLESS}


def defaults() -> dict[str, Any]:
    """`table.key` -> default for all keys that have one."""
    tables: dict[str, Any] = TABLES
    keys = ((table, f) for table, kind in tables.items() for f in fields(kind))
    return {f"{table}.{f.name}": f.default for table, f in keys if f.default is not MISSING}


def _fetch(recipe: Recipe, model: Path) -> Step:
    keys = ("source", "revision", "trust_remote_code")
    slice_ = {f"model.{key}": getattr(recipe.model, key) for key in keys}
    return Step(
        name="model",
        stage="fetch",
        title=f"fetch {recipe.model.source}",
        folder=model,
        inputs={},
        settings=slice_,
    )


def _steps(recipe: Recipe, run: Path, model: Path) -> Iterator[Step]:
    """Every step after the model is there; each evaluation stands right after what it measures."""
    tuned = {"model": model, "adapter": adapter_folder(recipe)}
    if trained_on := locate_adapter_base(recipe.model, recipe.folder):
        tuned["trained_on"] = trained_on
    merged = run / "merge"
    yield _evaluate(recipe, run, "base", {"model": model})
    if recipe.model.adapter is None:
        yield _train(recipe, run, model)
    if recipe.train.method == "full":
        tuned, merged = {"model": run / "train"}, run / "train"
    yield _evaluate(recipe, run, "adapter", {**tuned, "parent": run / "evaluate-base"})
    if merges(recipe):
        yield _step("merge", "merge the adapter into the model", run, tuned, {})
        yield _evaluate(recipe, run, "merged", {"model": merged, **_parent(run, "adapter")})
    yield _quantize(recipe, run, {"model": merged} if merges(recipe) else tuned)
    if recipe.qat.steps:
        yield _qat(recipe, run)
    parent = _parent(run, "merged" if merges(recipe) else "adapter")
    yield _evaluate(recipe, run, "quantized", {"model": small_folder(recipe), **parent})
    for target in recipe.deploy.targets:
        yield from _deploy(recipe, run, target)


def _step(stage: str, title: str, run: Path, inputs: dict[str, Path], slice_: Any) -> Step:
    return Step(
        name=stage, stage=stage, title=title, folder=run / stage, inputs=inputs, settings=slice_
    )


def _train(recipe: Recipe, run: Path, model: Path) -> Step:
    lora = recipe.train.method == "lora"
    slice_ = {"seed": recipe.seed, **settings(recipe, "model", "data", "train")}
    return Step(
        name="train",
        stage="train",
        title=f"train a rank {recipe.lora.rank} adapter" if lora else "train every weight",
        folder=run / "train",
        inputs={"model": model},
        settings={**slice_, **(settings(recipe, "lora") if lora else {})},
        reads_data=True,
    )


def _evaluate(recipe: Recipe, run: Path, subject: str, inputs: dict[str, Path]) -> Step:
    base = {} if subject == "base" else {"base": run / "evaluate-base"}
    slice_ = {"model.engine": recipe.model.engine, **settings(recipe, "data", "evaluate")}
    return Step(
        name=f"evaluate-{subject}",
        stage="evaluate",
        title=f"evaluate {subject}",
        folder=run / f"evaluate-{subject}",
        inputs={**inputs, **base},
        settings=slice_,
        subject=subject,
        reads_data=True,
    )


def _parent(run: Path, subject: str) -> dict[str, Path]:
    return {"parent": run / f"evaluate-{subject}", "tuned": run / "evaluate-adapter"}


def _quantize(recipe: Recipe, run: Path, inputs: dict[str, Path]) -> Step:
    """A calibrated method reads training rows with the model; the others read weights alone."""
    calibrated = recipe.quantize.method in CALIBRATED
    if calibrated:
        slice_ = {"seed": recipe.seed, **settings(recipe, "model", "data", "quantize")}
        inputs = {**inputs, **_calibration(recipe)}
    else:
        slice_ = settings(recipe, "quantize")
        for key in (
            "calibration_tokens",
            "recover_tokens",
            "recover_passes",
            "sequential",
            "importance",
            *BUDGETS,
        ):
            del slice_[f"quantize.{key}"]
    return Step(
        name="quantize",
        stage="quantize",
        title=_quantize_title(recipe),
        folder=run / "quantize",
        inputs=inputs,
        settings=slice_,
        reads_data=calibrated,
    )


def _calibration(recipe: Recipe) -> dict[str, Path]:
    """The file that is read in place of the training rows, where the recipe names one."""
    name = recipe.quantize.calibration
    if name is None:
        return {}
    file = recipe.folder / Path(name).expanduser()
    if not file.is_file():
        raise DataError(
            f"there is no file {file}", "quantize.calibration starts at the recipe's folder"
        )
    return {"calibration": file}


def _quantize_title(recipe: Recipe) -> str:
    q = recipe.quantize
    group = f"groups of {q.group_size}" if q.group_size else "per channel"
    return f"quantize to {q.goal}, {group}"


def _qat(recipe: Recipe, run: Path) -> Step:
    """What [train] says of a learning rate and of an adapter's kind is not read."""
    slice_ = {"seed": recipe.seed, **settings(recipe, "model", "data", "train", "qat")}
    for key in ("learning_rate", "min_learning_rate", "warmup_steps", "frozen_dtype", "method"):
        del slice_[f"train.{key}"]
    return Step(
        name="qat",
        stage="qat",
        title=f"train scales for {counted(recipe.qat.steps, 'update')}",
        folder=run / "qat",
        inputs={"model": run / "quantize"},
        settings=slice_,
        reads_data=True,
    )


def _deploy(recipe: Recipe, run: Path, target: str) -> Iterator[Step]:
    folder, data = run / f"deploy-{target}", settings(recipe, "data")
    # A bundle leaves the run; it must be asked as it was trained.
    rendering = {key: data[key] for key in ("data.chat_template", "data.format")}
    yield Step(
        name=folder.name,
        stage="deploy",
        title=f"deploy to {target}",
        folder=folder,
        inputs={"model": small_folder(recipe)},
        settings={
            "target": target,
            "deploy.context": recipe.deploy.context,
            "deploy.gate_prompts": recipe.deploy.gate_prompts,
            **rendering,
        },
        subject=target,
    )
    if target not in DEVICE_ONLY:
        inputs = {"bundle": folder, **_parent(run, "quantized")}
        yield _evaluate(recipe, run, f"deployed-{target}", inputs)
