"""The folder for what can be made again: tables derived from libraries, findings of a check."""

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """$PIPPIN_CACHE, else pippin's folder in the user's cache; it need not exist."""
    if chosen := os.environ.get("PIPPIN_CACHE"):
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "pippin"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pippin"


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
