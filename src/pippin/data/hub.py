"""A hub data set as a local folder of its parquet and JSON files."""

import re
from pathlib import Path

from pippin.errors import DataError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(?:/[\w./-]+)?")
PATTERNS = ("*.parquet", "*.jsonl", "*.json", "*.csv", "*.tsv", "*.txt")
LEFT_OUT = ("README*", "LICENSE*", ".*", "dataset_infos.json", "*/.*")


def looks_like_hub_id(source: str) -> bool:
    """`owner/name`, or `owner/name/folder` for one configuration of a data set."""
    return bool(HUB_ID.fullmatch(source))


def fetch_dataset(source: str) -> Path:
    """Download a data set's files and return the folder they are in, as the hub lays it out.

    Only data files are taken, never a loading script. Raises DataError with the reason.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError

    owner, name, *inner = source.split("/")
    inside = "/".join(inner)
    try:
        folder = snapshot_download(
            f"{owner}/{name}",
            repo_type="dataset",
            allow_patterns=[f"{inside}/{p}" if inside else p for p in PATTERNS],
            ignore_patterns=list(LEFT_OUT),
        )
    except (HTTPError, HFValidationError, OSError) as error:
        raise DataError(
            f"{source!r} is no local file or folder, and the hub gave no data set of that name: "
            f"{str(error).strip().splitlines()[0]}",
            "look at the path (it starts at the recipe's folder), the spelling and the network",
        ) from error
    return Path(folder) / inside
