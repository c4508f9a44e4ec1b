"""A folder of tensors and a record, whole or not at all, that shows whether it was damaged."""

import json
from pathlib import Path
from typing import Any

from pippin import artifact, disk
from pippin.engines import Weights
from pippin.errors import PippinError
from pippin.model.weights import Writer, file_tensors, read_tensor

STATE, RECORD = "state.safetensors", "progress.json"


class DamagedError(Exception):
    """A sealed folder that cannot be used, and why."""


def seal(folder: Path, state: Weights, record: dict[str, Any]) -> None:
    """Write tensors and record (JSON) as `folder`, and bring them to the disk."""
    with disk.whole(folder) as partial:
        with Writer(partial, state, shard_bytes=2**63) as writer:
            for name, tensor in state.items():
                writer.write(name, tensor)
        (partial / "model.safetensors").rename(partial / STATE)
        record = {**record, "sha256": artifact.digest(partial / STATE)}
        (partial / RECORD).write_text(json.dumps(record, indent=2) + "\n")


def check(folder: Path) -> dict[str, Any]:
    """The record of a folder whose tensors are what was written; DamagedError otherwise."""
    try:
        record = json.loads((folder / RECORD).read_text())
        if artifact.digest(folder / STATE) == record["sha256"]:
            return record
    except (OSError, ValueError, TypeError, KeyError, PippinError) as error:
        raise DamagedError(str(error)) from error
    raise DamagedError(f"{STATE} is not what was written")


def tensors(folder: Path) -> Weights:
    """The tensors of a checked folder."""
    infos = file_tensors(folder / STATE)
    return {name: read_tensor(info) for name, info in infos.items()}
