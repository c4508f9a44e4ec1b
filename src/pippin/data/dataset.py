"""Where the rows of a split come from: a file, a folder with one file a split, a hub data set."""

import difflib
import hashlib
import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

from pippin import artifact
from pippin.data.faults import every
from pippin.data.files import DOCUMENTS, READERS, read_records
from pippin.data.holdout import part_of
from pippin.data.hub import fetch_dataset, looks_like_hub_id
from pippin.data.shapes import Row, shape_of, to_row
from pippin.errors import DataError
from pippin.recipe import Data

Split: TypeAlias = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")

NAMES: dict[str, Split] = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "eval": "valid",
    "test": "test",
    "testing": "test",
    "heldout": "test",
    "holdout": "test",
}
NOT_DATA = ("README", "LICENSE", "LICENCE", "CHANGELOG")


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The files of a split; `held_out` when it is set aside from the training files instead."""

    files: tuple[Path, ...]
    held_out: bool = False


def load_split(data: Data, folder: Path, split: Split) -> list[Row]:
    """The rows of a split, in the order of the files; `folder` is where relative paths start.

    `data.max_rows` shortens the training split alone. Raises DataError with file and line.
    """
    origins = _origins(data, folder)
    rows = _read_rows(origins[split].files, data)
    shared = tuple(name for name in SPLITS if name == "train" or origins[name].held_out)
    if split in shared:
        rows = part_of(rows, split, shared)
    return rows[: data.max_rows] if split == "train" else rows


def load_file(path: Path, data: Data) -> list[Row]:
    """All rows of one file, in the format that its first row tells."""
    return _read_rows((path,), replace(data, format="auto"))


def find_splits(data: Data, folder: Path) -> dict[str, Path | str]:
    """Each split's file, or the folder of its files; in words where it is set aside from train."""
    found: dict[str, Path | str] = {}
    for name, origin in _origins(data, folder).items():
        place = origin.files[0] if len(origin.files) == 1 else origin.files[0].parent
        found[name] = f"set aside from {place.name}" if origin.held_out else place
    return found


def data_digest(data: Data, folder: Path) -> str:
    """sha256 over the contents of all files of all splits, in their order."""
    origins = _origins(data, folder)
    lines = [f"{n} {artifact.digest(file)}" for n in SPLITS for file in origins[n].files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _read_rows(files: tuple[Path, ...], data: Data) -> list[Row]:
    """Rows of all files in one shape: the recipe's, or the one of the very first row."""
    shape = None if data.format == "auto" else data.format
    rows: list[Row] = []
    for file in files:
        records = read_records(file)
        shape = shape or shape_of(records[0])
        document = file.suffix.lower() in DOCUMENTS
        rows += every(partial(to_row, shape=shape, document=document), records)
    return rows


def _origins(data: Data, folder: Path) -> dict[Split, Origin]:
    source = _locate(data.source, folder)
    if source.is_dir():
        files = _files_by_split(source)
    else:
        files: dict[Split, tuple[Path, ...]] = {"train": (source,)}
    for split, given in (("valid", data.valid), ("test", data.test)):
        if given is not None:
            place = _locate(given, folder)
            files[split] = _data_files(place) if place.is_dir() else (place,)
    train = files["train"]
    return {n: Origin(files=files.get(n, train), held_out=n not in files) for n in SPLITS}


def _locate(source: str, folder: Path) -> Path:
    path = folder / Path(source).expanduser()
    if path.exists():
        return path
    if looks_like_hub_id(source) and path.suffix.lower() not in READERS:
        return fetch_dataset(source)
    beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, 1)
    raise DataError(
        f"there is no file or folder {path}",
        f"did you mean {near[0]!r}?" if near else "paths start at the recipe's folder",
    )


def _files_by_split(folder: Path) -> dict[Split, tuple[Path, ...]]:
    for place in (folder, folder / "data"):
        found = _named_splits(place) if place.is_dir() else {}
        if "train" in found:
            return found
    inner = sorted(p.name for p in folder.iterdir() if p.is_dir() and _named_splits(p))
    if inner:
        raise DataError(
            f"{folder} holds several data sets: {', '.join(inner)}",
            f"choose one: data.source = '.../{inner[0]}'",
        )
    if _named_splits(folder):
        names = ", ".join(sorted(p.name for p in folder.iterdir())[:8])
        raise DataError(
            f"{folder} has no training file; it holds {names}",
            "name the files train.jsonl, valid.jsonl and test.jsonl (or .json .csv .parquet .txt)",
        )
    return {"train": _data_files(folder)}


def _named_splits(folder: Path) -> dict[Split, tuple[Path, ...]]:
    found: dict[Split, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        split = _split_of(path)
        if split is not None:
            found.setdefault(split, []).append(path)
    return {split: _one_source(paths, split) for split, paths in found.items()}


def _split_of(path: Path) -> Split | None:
    if path.name.startswith(".") or not (path.is_dir() or path.suffix.lower() in READERS):
        return None
    words = re.split(r"[-_. ]+", path.name.lower() if path.is_dir() else path.stem.lower())
    splits = {NAMES[word] for word in words if word in NAMES}
    return splits.pop() if len(splits) == 1 else None


def _one_source(paths: list[Path], split: Split) -> tuple[Path, ...]:
    if len({re.sub(r"\d+", "#", path.name) for path in paths}) > 1:
        names = " and ".join(path.name for path in paths[:3])
        raise DataError(
            f"{paths[0].parent}: {names} could all be the {split} split",
            f"leave one of them there, or name the files in data.source and data.{split}",
        )
    return _data_files(paths[0]) if paths[0].is_dir() else tuple(paths)


def _data_files(folder: Path) -> tuple[Path, ...]:
    readable = (p for p in sorted(folder.iterdir()) if p.suffix.lower() in READERS)
    files = tuple(p for p in readable if not p.name.startswith((".", *NOT_DATA)))
    if not files:
        raise DataError(f"{folder} holds no data file", f"use {', '.join(READERS)}")
    if len({file.suffix.lower() for file in files}) > 1:
        raise DataError(
            f"{folder} mixes formats: {', '.join(file.name for file in files[:4])}",
            "keep one format in a folder",
        )
    return files
