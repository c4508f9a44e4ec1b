"""Finds what a folder holds that can speak: a bundle, an adapter, a model, or a whole run."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pippin import artifact
from pippin.errors import ModelError
from pippin.recipe import DEVICE_ONLY, Recipe
from pippin.stages.loading import DEPLOY_FILE

ADAPTER_FILE = "adapter_config.json"
MODEL_FILE = "config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """`inputs` are folders by role, as a Job has them; `title` names them for people."""

    inputs: dict[str, Path]
    title: str

    @property
    def folder(self) -> Path:
        """The folder that has the tokenizer and the config."""
        return self.inputs["bundle"] if "bundle" in self.inputs else self.inputs["model"]


def find(
    folder: Path,
    base: Path | None = None,
    adapter: Path | None = None,
    recipe: Recipe | None = None,
) -> Found:
    """What speaks from `folder`; `base` is the model under an adapter, or of a run just begun.

    `adapter` is one that the run did not train itself. What `recipe` no longer asks for is passed
    over; without one, what the run itself has moved on from. Raises ModelError where nothing
    speaks, or an adapter's base is not on disk.
    """
    if (folder / DEPLOY_FILE).is_file():
        return Found(inputs={"bundle": folder}, title=f"deployed model {folder}")
    if (folder / ADAPTER_FILE).is_file():
        model = base or _base_of(folder)
        return Found(inputs={"model": model, "adapter": folder}, title=f"adapter {folder}")
    if (folder / MODEL_FILE).is_file():
        return Found(inputs={"model": folder}, title=f"model {folder}")
    return _newest(folder, base, adapter, recipe)


def _newest(run: Path, base: Path | None, adapter: Path | None, recipe: Recipe | None) -> Found:
    for title, folder in _furthest_first(run, adapter, recipe):
        if folder == adapter or artifact.read_manifest(folder) is not None:
            return Found(inputs=find(folder, base).inputs, title=f"{title} {folder}")
    if base is not None and (base / MODEL_FILE).is_file():
        return Found(inputs={"model": base}, title=f"base model {base}")
    if not run.is_dir():
        raise ModelError(
            f"{run} is no folder",
            "give a recipe or a folder; a hub id, a .gguf file or builtin:smollm2 speaks after "
            "`pippin run` of a recipe that names it as model.source",
        )
    raise ModelError(
        f"{run} holds no model",
        "give a recipe, or the folder of a run, a model, an adapter or a deployed bundle",
    )


def _furthest_first(
    run: Path, adapter: Path | None, recipe: Recipe | None
) -> Iterator[tuple[str, Path]]:
    trained = recipe.qat.steps > 0 if recipe else _uses_qat(run)
    small = run / ("qat" if trained else "quantize")
    for bundle in sorted(run.glob("deploy-*")):
        target = bundle.name.removeprefix("deploy-")
        asked = recipe is None or target in recipe.deploy.targets
        if asked and target not in DEVICE_ONLY and _made_from(bundle, small):
            yield "deployed model", bundle
    yield "quantized model", small
    yield "quantized model", run / "quantize"
    yield "merged model", run / "merge"
    yield "tuned model", adapter or run / "train"
    yield "base model", run / "model"


def _uses_qat(run: Path) -> bool:
    """Whether the run's `qat` is of its `quantize`, and that one was not measured instead since."""
    if artifact.read_manifest(run / "qat") is None:
        return False
    measured = _made_from(run / "evaluate-quantized", run / "qat")
    return measured and _made_from(run / "qat", run / "quantize")


def _made_from(folder: Path, model: Path) -> bool:
    """Whether `folder` was made from what `model` holds, as far as both are still there."""
    made = (artifact.read_manifest(folder) or {}).get("inputs", {}).get("model")
    return made is None or not model.is_dir() or made == artifact.digest(model)


def _base_of(adapter: Path) -> Path:
    """The base: beside the adapter in its run, or the folder its config names."""
    named = _named_base(adapter)
    for folder in (adapter.parent / "model", Path(named or "")):
        if (folder / MODEL_FILE).is_file():
            return folder
    raise ModelError(
        f"the base {named or '(unnamed)'} of adapter {adapter} is not on this disk",
        "give its folder with --base",
    )


def _named_base(adapter: Path) -> str | None:
    """What the adapter's config calls its base. Raises ModelError where it cannot be read."""
    try:
        return json.loads((adapter / ADAPTER_FILE).read_text()).get("base_model_name_or_path")
    except (ValueError, AttributeError) as error:
        raise ModelError(
            f"{adapter / ADAPTER_FILE} is no PEFT configuration: {error}", "save the adapter again"
        ) from error
