"""A stage's folder: written whole or not at all, with a manifest of what it was made from."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pippin import __version__
from pippin.errors import PippinError

MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """What a stage is made from: digests of its inputs, its slice of the recipe, versions."""

    stage: str
    inputs: dict[str, str]
    settings: dict[str, Any]
    versions: dict[str, str]


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a finished stage, or None where there is none or it cannot be read."""
    try:
        return json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return None


def differences(folder: Path, origin: Origin) -> list[str] | None:
    """Why the folder does not stand for `origin`; [] when it does, None when nothing is there.

    Versions may differ: a finished stage stays finished after an upgrade.
    """
    recover(folder)
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    changed = [f"input {k}" for k in _changed(manifest.get("inputs", {}), origin.inputs)]
    old, new = manifest.get("settings", {}), _plain(origin.settings)
    for name in _changed(old, new):
        changed.append(f"{name} {old.get(name)!r} -> {new.get(name)!r}")
    return changed


@contextlib.contextmanager
def writing(folder: Path, origin: Origin, scores: dict[str, Any]) -> Iterator[Path]:
    """A temporary folder that becomes `folder` when the block ends well, and vanishes otherwise.

    `scores` may be filled inside the block; it goes into the manifest. Raises PippinError where
    `folder` exists and was not made by pippin, or the disk is full or closed to us.
    """
    refuse_foreign(folder)
    partial = folder.with_name(f".{folder.name}.partial")
    with disk_errors(folder):
        discard(partial)
        partial.mkdir(parents=True)
        try:
            yield partial
            write_manifest(partial, origin, scores)
            commit(partial, folder)
        except BaseException:
            discard(partial)
            raise


def write_manifest(folder: Path, origin: Origin, scores: dict[str, Any]) -> None:
    """Describe every file of the folder in its manifest."""
    manifest = {
        "pippin": __version__,
        "stage": origin.stage,
        "inputs": origin.inputs,
        "settings": _plain(origin.settings),
        "versions": origin.versions,
        "scores": scores,
        "files": file_digests(folder),
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def commit(partial: Path, folder: Path) -> None:
    """Put a complete temporary folder in its place: bytes to the disk first, then one rename."""
    for path in sorted(partial.rglob("*")):
        _sync(path)
    _sync(partial)
    old = folder.with_name(f".{folder.name}.old")
    discard(old)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    _sync(folder.parent)
    discard(old)


def recover(folder: Path) -> None:
    """Undo a replacement that was cut off between its two renames."""
    old = folder.with_name(f".{folder.name}.old")
    if old.exists() and not folder.exists():
        old.rename(folder)


def discard(folder: Path) -> None:
    """Remove one of our own temporary folders."""
    shutil.rmtree(folder, ignore_errors=True)


def refuse_foreign(folder: Path) -> None:
    """Raise where `folder` holds something that pippin did not make."""
    if folder.exists() and read_manifest(folder) is None and any(folder.iterdir()):
        raise PippinError(
            f"{folder} exists and was not made by pippin",
            "choose another `out`, or move that folder away",
        )


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what a disk can refuse into an error for people."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise PippinError(
                f"the disk of {path} is full",
                "free some space, or choose another `out`; nothing finished was lost",
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise PippinError(
                f"no permission to write {error.filename or path}",
                "choose an `out` folder that you may write to",
            ) from error
        raise


def digest(path: Path) -> str:
    """sha256 of a file, of a stage's manifest, or of all the files of another folder."""
    if path.is_file():
        return _sha256(path)
    manifest = path / MANIFEST
    if manifest.exists():
        return _sha256(manifest)
    listing = json.dumps(file_digests(path), sort_keys=True)
    return hashlib.sha256(listing.encode()).hexdigest()


def file_digests(folder: Path) -> dict[str, str]:
    """sha256 by relative path, hidden files and the manifest itself left out."""
    files = (p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != MANIFEST)
    visible = (
        p for p in files if not any(part.startswith(".") for part in p.relative_to(folder).parts)
    )
    return {str(p.relative_to(folder)): _sha256(p) for p in visible}


def size(folder: Path) -> int:
    """Bytes of all files in the folder."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _changed(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return sorted(k for k in old.keys() | new.keys() if old.get(k) != new.get(k))


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(settings))
