"""The folder for what can be made again: tables derived from libraries, findings of a check."""

import os
import sys
from pathlib import Path

from pippin.errors import UsageError


def cache_folder() -> Path:
    """$PIPPIN_CACHE, else pippin's folder in the user's cache; it need not exist.

    Raises UsageError for a user without a home.
    """
    if chosen := os.environ.get("PIPPIN_CACHE"):
        return Path(chosen)
    if sys.platform != "darwin" and (caches := os.environ.get("XDG_CACHE_HOME")):
        return Path(caches) / "pippin"
    try:
        home = Path.home()
    except RuntimeError as error:
        raise UsageError("this user has no home folder", "set HOME, or PIPPIN_CACHE") from error
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "pippin"


def write_cached(path: Path, text: str) -> bool:
    """Write whole or not at all; whether it was, as a folder may be one that cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_text(text)
        partial.replace(path)
    except OSError:
        return False
    return True
