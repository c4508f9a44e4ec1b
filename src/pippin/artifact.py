"""A stage's folder: written whole or not at all, with a manifest of what it was made from."""

import contextlib
import hashlib
import json
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pippin import __version__, disk
from pippin.errors import PippinError

MANIFEST = "manifest.json"
READ_AGAIN = 2**20  # bytes up to which a finished stage's files are read again


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """What a stage is made from: digests of its inputs, its slice of the recipe, versions.

    `defaults` of settings stand for those that an older version did not know.
    """

    stage: str
    inputs: dict[str, str]
    settings: dict[str, Any]
    versions: dict[str, str]
    defaults: dict[str, Any] = field(default_factory=dict)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a finished stage; None where there is none, or it is not one of ours."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    ours = isinstance(manifest, dict) and {"pippin", "stage", "files"} <= manifest.keys()
    return manifest if ours else None


def differences(folder: Path, origin: Origin) -> list[str] | None:
    """Why the folder does not stand for `origin`; [] when it does, None when nothing is there.

    A changed input reads `input NAME`. Versions may differ: a finished stage stays finished after
    an upgrade. A file that is missing or has another size counts, and so does a small one with
    other contents: those people edit. Weights are not read again.
    """
    disk.recover(folder)
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    return origin_differences(manifest, origin) + _damage(folder, manifest["files"])


def origin_differences(made: dict[str, Any], origin: Origin) -> list[str]:
    """What differs between the origin in a manifest (or a checkpoint's record) and `origin`."""
    old, new = _flat(made.get("settings", {})), _flat(_plain(origin.settings))
    known = {name: value for name, value in origin.defaults.items() if name in new}
    old = _plain(known) | old
    stage = [] if made.get("stage") == origin.stage else [f"stage {made.get('stage')}"]
    inputs = [f"input {name}" for name in _changed(made.get("inputs", {}), origin.inputs)]
    settings = [f"{name} {old.get(name)!r} -> {new.get(name)!r}" for name in _changed(old, new)]
    return stage + inputs + settings


@contextlib.contextmanager
def writing(folder: Path, origin: Origin, scores: dict[str, Any]) -> Generator[Path]:
    """A temporary folder that becomes `folder` when the block ends well, and vanishes otherwise.

    `scores` may be filled inside the block; it goes into the manifest. Raises PippinError where
    `folder` exists and was not made by pippin, or the disk is full or closed to us.
    """
    refuse_foreign(folder)
    with disk.whole(folder) as partial:
        yield partial
        write_manifest(partial, origin, scores)


def write_manifest(folder: Path, origin: Origin, scores: dict[str, Any]) -> None:
    """Describe every file of the folder in its manifest."""
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": sha256}
        for name, sha256 in file_digests(folder).items()
    }
    manifest = {"pippin": __version__, **record(origin), "scores": scores, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def record(origin: Origin) -> dict[str, Any]:
    """The origin as JSON holds it; `origin_differences` compares with it."""
    return {
        "stage": origin.stage,
        "inputs": origin.inputs,
        "settings": _plain(origin.settings),
        "versions": origin.versions,
    }


def refuse_foreign(folder: Path) -> None:
    """Raise where `folder` holds something that pippin did not make."""
    disk.recover(folder)
    manifest = read_manifest(folder)
    made = manifest["files"] if manifest else {}
    foreign = [name for name in _visible(folder) if name not in made]
    if foreign and manifest:
        raise PippinError(
            f"{folder} holds {foreign[0]}, which pippin did not make",
            "move that file away: the folder is about to be replaced",
        )
    if foreign or (folder.exists() and not folder.is_dir()):
        raise PippinError(
            f"{folder} exists and was not made by pippin",
            "choose another `out`, or move it away",
        )


def digest(path: Path) -> str:
    """sha256 of a file, or over the names and contents of all files of a folder.

    A finished stage's contents are taken from its manifest.
    """
    if path.is_file():
        return _sha256(path)
    if not path.is_dir():
        raise PippinError(f"{path} does not exist", "check the path, or make it first")
    manifest = read_manifest(path)
    if manifest is None:
        digests = file_digests(path)
    else:
        digests = {name: made["sha256"] for name, made in manifest["files"].items()}
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def file_digests(folder: Path) -> dict[str, str]:
    """sha256 by relative path, hidden files and the manifest itself left out."""
    return {name: _sha256(folder / name) for name in _visible(folder)}


def size(folder: Path) -> int:
    """Bytes of all files in the folder."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def _visible(folder: Path) -> list[str]:
    files = [p.relative_to(folder) for p in sorted(folder.rglob("*")) if p.is_file()]
    shown = (p for p in files if not any(part.startswith(".") for part in p.parts))
    return [p.as_posix() for p in shown if p != Path(MANIFEST)]


def _damage(folder: Path, files: dict[str, Any]) -> list[str]:
    found = {name: (folder / name).stat().st_size for name in _visible(folder)}
    missing = [f"file {name} is missing" for name in files if name not in found]
    resized = [
        f"file {name} has {found[name]} bytes, was written with {made['bytes']}"
        for name, made in files.items()
        if name in found and found[name] != made["bytes"]
    ]
    small = (name for name, size in found.items() if name in files and size <= READ_AGAIN)
    altered = [
        f"file {name} has other contents than were written"
        for name in small
        if found[name] == files[name]["bytes"] and _sha256(folder / name) != files[name]["sha256"]
    ]
    return missing + resized + altered


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _changed(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return sorted(k for k in old.keys() | new.keys() if old.get(k) != new.get(k))


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(settings))
