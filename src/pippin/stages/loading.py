"""Loads what can be measured or spoken to; a missing package becomes an error with a hint."""

import contextlib
import json
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from pippin.engines import Engine, Scorer, load_engine
from pippin.errors import ModelError, PippinError
from pippin.model.config import read_config
from pippin.quiet import quiet_imports
from pippin.recipe import Model
from pippin.targets import EXTRAS, TARGETS, Target, load_target

DEPLOY_FILE = "deploy.json"


@contextlib.contextmanager
def needs(what: str, extra: str) -> Generator[None]:
    """Inside, imports are quiet; one that fails for want of a package is a PippinError."""
    try:
        with quiet_imports():
            yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "pippin":
            raise
        raise PippinError(
            f"{what} needs the package {error.name.split('.')[0]}, which is not installed",
            f'pip install "pippin[{extra}]"',
        ) from error


def needs_of(target: str) -> contextlib.AbstractContextManager[None]:
    """`needs` of a target's packages."""
    return needs(f"target {target}", EXTRAS[target])


def open_engine(model: Model) -> Engine:
    """`load_engine` as the recipe says, with a hint where its framework is missing."""
    with needs(f"engine {model.engine}", model.engine):
        return load_engine(model.engine, model.device, model.trust_remote_code, model.attention)


def open_target(name: str) -> Target:
    """`load_target`, with a hint where its framework is missing."""
    with needs_of(name):
        return load_target(name)


def load_scorer(inputs: Mapping[str, Path], model: Model, dtype: str) -> Scorer:
    """The deployed file under `bundle`, or the folder under `model` with the one under `adapter`.

    A deployed file runs in its own runtime; anything else in the recipe's engine, in `dtype`.
    """
    if "bundle" in inputs:
        name = target_of(inputs["bundle"])
        with needs_of(name):
            return load_target(name).load(inputs["bundle"])
    engine = open_engine(model)
    return engine.load(inputs["model"], dtype, inputs.get("adapter"))


def target_of(bundle: Path) -> str:
    """The target that made a bundle. Raises ModelError where its deploy.json does not say."""
    try:
        name = json.loads((bundle / DEPLOY_FILE).read_text())["target"]
    except (OSError, ValueError, KeyError, TypeError):
        name = None
    if name not in TARGETS:
        raise ModelError(
            f"{bundle} is no bundle of a target known here ({', '.join(TARGETS)})",
            "deploy again: --redo deploy",
        )
    return name


def runtime_of(inputs: Mapping[str, Path]) -> str | None:
    """What computes a deployed file here, in words; None for a model in the recipe's engine."""
    if "bundle" not in inputs:
        return None
    return json.loads((inputs["bundle"] / DEPLOY_FILE).read_text()).get("runtime")


def check_of(inputs: Mapping[str, Path]) -> dict[str, Any]:
    """The figures of a deployed file's check; none for a model in the recipe's engine."""
    if "bundle" not in inputs:
        return {}
    return json.loads((inputs["bundle"] / DEPLOY_FILE).read_text()).get("check", {})


def context_of(inputs: Mapping[str, Path]) -> int | None:
    """How many tokens the thing can hold at once; None where nothing says so."""
    if "bundle" in inputs:
        return json.loads((inputs["bundle"] / DEPLOY_FILE).read_text()).get("context")
    return read_config(inputs["model"]).max_positions
