"""Deployment formats: what each can hold, how it is written, how it is run for the comparison."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias, cast

from pippin.engines import Scorer
from pippin.events import Event
from pippin.recipe import Quantize, Recipe

Refusal: TypeAlias = tuple[str, str]  # message and hint

TARGETS = {
    "coreai": "pippin.targets.coreai",
    "coreml": "pippin.targets.coreml",
    "executorch": "pippin.targets.executorch",
    "gguf": "pippin.targets.gguf",
    "hf": "pippin.targets.hf",
    "mlx": "pippin.targets.mlx",
}
# What `pip install "pippin[...]"` brings for each.
EXTRAS = {
    "coreai": "coreai",
    "coreml": "coreml",
    "executorch": "deploy",
    "gguf": "torch",
    "hf": "hf",
    "mlx": "mlx",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """One deployment to make: from the quantized folder into `folder`, which exists."""

    quantized: Path
    folder: Path
    context: int


class Target(Protocol):
    """One deployment format."""

    def refusal(self, quantize: Quantize, checkpoint: Path) -> Refusal | None:
        """Why this target cannot hold such a model, as (message, hint); None when it can.

        Asked before anything is trained or quantized, of the base model's folder.
        """
        ...

    def write(self, bundle: Bundle) -> Iterator[Event]:
        """Make the files. Events carry stage `deploy`."""
        ...

    def load(self, folder: Path) -> Scorer:
        """The deployed file in what runs it here, which deploy.json names as `runtime`."""
        ...


def load_target(name: str) -> Target:
    """The target behind a name of TARGETS."""
    return cast("Target", importlib.import_module(TARGETS[name]).make_target())


def check_recipe(recipe: Recipe, checkpoint: Path) -> list[Refusal]:
    """Every refusal of the recipe's targets, before any work."""
    asked = (
        load_target(name).refusal(recipe.quantize, checkpoint) for name in recipe.deploy.targets
    )
    return [refusal for refusal in asked if refusal is not None]
