"""What the last `pippin check` found wrong, kept in the cache, and what a plan makes of it."""

import importlib.metadata
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pippin.caching import cache_folder, write_cached
from pippin.check import Fallback, Finding
from pippin.recipe import Recipe

HALF = ("bfloat16", "float16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Wrong:
    """A probe that was wrong, and what its failure asks to avoid."""

    probe: str
    avoid: Fallback

    @property
    def half(self) -> bool:
        """Whether half precision alone is to blame."""
        return self.probe.endswith(HALF)


def record(engine: str, device: str, findings: Sequence[Finding]) -> None:
    """Keep the wrong ones of a device, with the engine's version."""
    wrong = [Wrong(probe=f.probe, avoid=f.avoid) for f in findings if f.verdict == "wrong"]
    kept = {"version": _version(engine), "wrong": [asdict(each) for each in wrong]}
    write_cached(_path(engine, device), json.dumps(kept))


def recall(engine: str, device: str) -> list[Wrong]:
    """The wrong ones of the last check; none where it is of another version, or was never made."""
    try:
        kept = json.loads(_path(engine, device).read_text())
    except (OSError, ValueError):
        return []
    if kept["version"] != _version(engine):
        return []
    return [Wrong(**each) for each in kept["wrong"]]


def heed(recipe: Recipe, device: str) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe with what the check found wrong left out, and what was changed in words.

    Where half precision alone is wrong, an `auto` dtype becomes float32; where more is, an `auto`
    device becomes the CPU. What a recipe says itself stays, and is told.
    """
    wrong = [
        each for each in recall(recipe.model.engine, device) if each.avoid not in ("", "compile")
    ]
    worse = [each.probe for each in wrong if not each.half]
    if worse and device != "cpu":
        return _changed(recipe, "device", "cpu", f"{_some(worse)} on {device}")
    half = [each.probe for each in wrong if each.half and each.probe.endswith("bfloat16")]
    if half:
        return _changed(recipe, "dtype", "float32", f"{_some(half)} on {device}")
    if worse:
        return recipe, (f"check: wrong is {_some(worse)} on {device}; there is no other device",)
    return recipe, ()


def _changed(recipe: Recipe, key: str, value: str, what: str) -> tuple[Recipe, tuple[str, ...]]:
    own = getattr(recipe.model, key)
    if own == value:
        return recipe, ()
    if own != "auto":
        return recipe, (
            f"check: wrong is {what}, but model.{key} is set to {own}; {value} is safe",
        )
    model = replace(recipe.model, **{key: value})
    return replace(recipe, model=model), (f"check: model.{key} is {value}, as wrong is {what}",)


def _some(probes: list[str]) -> str:
    more = f" and {len(probes) - 2} more" if len(probes) > 2 else ""
    return ", ".join(probes[:2]) + more


def _path(engine: str, device: str) -> Path:
    return cache_folder() / f"check-{engine}-{device}.json"


def _version(engine: str) -> str:
    try:
        return importlib.metadata.version(engine)
    except importlib.metadata.PackageNotFoundError:
        return ""
