"""Deployment formats: what each can hold, how it is written, how it is run for the comparison."""

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

from pippin.engines import Scorer
from pippin.errors import Refusal
from pippin.events import Event
from pippin.model.config import read_config
from pippin.quantizers import Grid, budget
from pippin.recipe import Quantize, Recipe

TARGETS = {
    "coreai": "pippin.targets.coreai",
    "coreml": "pippin.targets.coreml",
    "executorch": "pippin.targets.executorch",
    "executorch-coreml": "pippin.targets.executorch.coreml",
    "executorch-mlx": "pippin.targets.executorch.mlx",
    "executorch-vulkan": "pippin.targets.executorch.vulkan",
    "gguf": "pippin.targets.gguf",
    "hf": "pippin.targets.hf",
    "mlx": "pippin.targets.mlx",
}
# What `pip install "pippin[...]"` brings for each.
EXTRAS = {
    "coreai": "coreai",
    "coreml": "coreml",
    "executorch": "deploy",
    "executorch-coreml": "deploy,coreml",
    "executorch-mlx": "deploy",
    "executorch-vulkan": "deploy",
    "gguf": "torch",
    "hf": "hf",
    "mlx": "mlx,torch",
}
# What each imports beside pippin's own dependencies.
PACKAGES = {
    "coreai": ("coreai", "coreai_torch", "torch"),
    "coreml": ("coremltools", "torch"),
    "executorch": ("executorch", "torchao", "torch"),
    "executorch-coreml": ("executorch", "torchao", "coremltools", "torch"),
    "executorch-mlx": ("executorch", "torchao", "torch"),
    "executorch-vulkan": ("executorch", "torchao", "torch"),
    "gguf": ("torch",),
    "hf": ("compressed_tensors", "torch"),
    "mlx": ("mlx", "mlx_lm", "torch"),
}
SHORTEST = 8  # tokens that a deployed model must hold
PROMPTS = 32  # in prompts.jsonl


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """One deployment to make: from the quantized folder into `folder`, which exists.

    The file is compared on the first `gate_prompts` prompts of targets/prompts.jsonl.
    """

    quantized: Path
    folder: Path
    context: int
    gate_prompts: int = PROMPTS


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


@runtime_checkable
class Sizer(Protocol):
    """What targets tell whose files take more than a weight's code and its share of the scales."""

    def stored_bits(self, grid: Grid, inputs: int) -> float:
        """Bits that a linear's weight of such a grid takes in the file, scales counted."""
        ...


def load_target(name: str) -> Target:
    """The target behind a name of TARGETS."""
    return cast("Target", importlib.import_module(TARGETS[name]).make_target())


def require_sound(folder: Path) -> None:
    """Raise ModelError for a quantized folder that is not whole, see soundness.py."""
    importlib.import_module("pippin.targets.soundness").require_sound(folder)


def check_recipe(recipe: Recipe, checkpoint: Path) -> list[Refusal]:
    """Every refusal of the recipe's targets, before any work."""
    targets = recipe.deploy.targets
    asked = [load_target(name).refusal(recipe.quantize, checkpoint) for name in targets]
    if targets:
        asked.append(refuse_context(recipe.deploy.context, checkpoint))
    return [refusal for refusal in asked if refusal is not None]


def stored_bits(recipe: Recipe, grid: Grid, inputs: int) -> float:
    """Bits of a linear's weight, scales counted, in the recipe's target that takes most for it."""
    plain = budget.stored_bits(grid, inputs)
    sizers = [s for s in map(load_target, recipe.deploy.targets) if isinstance(s, Sizer)]
    return max([plain, *(sizer.stored_bits(grid, inputs) for sizer in sizers)])


def refuse_context(context: int, checkpoint: Path) -> Refusal | None:
    """Why the model in a folder cannot be deployed with a context of so many tokens."""
    limit = read_config(checkpoint).max_positions
    if context >= SHORTEST and (limit is None or context <= limit):
        return None
    known = "" if limit is None else f"; the model knows positions up to {limit}"
    end = f" and {limit}" if limit is not None else " and what the model holds"
    return (
        f"a context of {context} tokens, the least is {SHORTEST}{known}",
        f"set deploy.context between {SHORTEST}{end}",
    )


def missing_packages(names: Iterable[str]) -> list[Refusal]:
    """A refusal for each target that lacks a package here; nothing is imported to find out."""
    lacking = {
        name: [package for package in PACKAGES[name] if find_spec(package) is None]
        for name in names
    }
    return [
        (
            f"target {name} needs the package {packages[0]}, which is not installed",
            f'pip install "pippin[{EXTRAS[name]}]", or leave it out of deploy.targets',
        )
        for name, packages in lacking.items()
        if packages
    ]
