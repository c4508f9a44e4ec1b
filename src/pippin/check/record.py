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

    def matters(self, dtype: str) -> bool:
        """Whether a plan can avoid it; float16 is computed where a recipe asks for it alone."""
        return self.avoid != "" and (dtype == "float16" or not self.probe.endswith(".float16"))


def record(engine: str, device: str, findings: Sequence[Finding]) -> str | None:
    """Keep the wrong ones of a device, with the engine's version; the file that refused, if any."""
    wrong = [Wrong(probe=f.probe, avoid=f.avoid) for f in findings if f.verdict == "wrong"]
    kept = {"version": _version(engine), "wrong": [asdict(each) for each in wrong]}
    path = _path(engine, device)
    return None if write_cached(path, json.dumps(kept)) else str(path)


def recall(engine: str, device: str) -> list[Wrong]:
    """The wrong ones of the last check; none where it is of another version, or was never made."""
    try:
        kept = json.loads(_path(engine, device).read_text())
        wrong = [Wrong(**each) for each in kept["wrong"]]
        return wrong if kept["version"] == _version(engine) else []
    except (OSError, ValueError, TypeError, KeyError):
        return []


def heed(recipe: Recipe, device: str) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe with what the check found wrong left out, and what was changed in words.

    Wrong attention kernels become plain products, where the engine has them and those are right;
    wrong compiled code is not used; where half precision alone is wrong besides, an `auto` dtype
    becomes float32; where more is, an `auto` device becomes the CPU. What a recipe says itself
    stays, and is told.
    """
    notices: list[str] = []
    found = recall(recipe.model.engine, device)
    wrong = [each for each in found if each.matters(recipe.model.dtype)]
    if recipe.model.engine == "torch":
        attention = [each.probe for each in wrong if each.avoid == "attention"]
        wrong = [each for each in wrong if each.avoid != "attention"]
        recipe = _model(recipe, notices, ("attention", "math"), attention, device)
    compiled = [each.probe for each in wrong if each.avoid == "compile"]
    wrong = [each for each in wrong if each.avoid != "compile"]
    if compiled and device == "cuda" and recipe.train.compile:
        recipe = replace(recipe, train=replace(recipe.train, compile=False))
        notices.append(f"check: train.compile is false, as wrong is {_some(compiled)} on {device}")
    worse = [each.probe for each in wrong if not each.half]
    if not worse:
        half = [each.probe for each in wrong]
        recipe = _model(recipe, notices, ("dtype", "float32"), half, device)
    elif device != "cpu":
        recipe = _model(recipe, notices, ("device", "cpu"), worse, device)
    else:
        notices.append(f"check: wrong is {_some(worse)} on {device}; there is no other device")
    return recipe, tuple(notices)


def _model(
    recipe: Recipe, notices: list[str], safe: tuple[str, str], wrong: list[str], device: str
) -> Recipe:
    """With an `auto` key of the model set to what is `safe`; appends what was done."""
    key, value = safe
    own = getattr(recipe.model, key)
    if not wrong or own == value:
        return recipe
    what = f"{_some(wrong)} on {device}"
    if own != "auto":
        notices.append(f"check: wrong is {what}, but model.{key} is set to {own}; {value} is safe")
        return recipe
    notices.append(f"check: model.{key} is {value}, as wrong is {what}")
    return replace(recipe, model=replace(recipe.model, **{key: value}))


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
