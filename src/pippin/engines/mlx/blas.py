"""OpenBLAS in the place of the reference BLAS that MLX's Linux wheel brings along.

The wheel's symbols are the standard ones, so a library that is loaded before and globally wins.
"""

import ctypes
import functools
import os
import sys

NAMES = ("libopenblas.so.0", "libopenblasp.so.0")
LATE = (
    "MLX was imported before pippin could load OpenBLAS, so its own BLAS computes, many times "
    "slower; load the engine first, or set LD_PRELOAD=libopenblas.so.0"
)
HINT = "apt install libopenblas0-pthread (Debian, Ubuntu), dnf install openblas-threads (Fedora)"


def preload() -> None:
    """Load OpenBLAS for the MLX that is imported next; nothing where MLX needs none."""
    if sys.platform == "linux" and "mlx.core" not in sys.modules:
        _load()


def notice() -> str | None:
    """What a run on a Linux CPU is told where OpenBLAS is missing, or came after MLX."""
    if sys.platform != "linux" or "openblas" in os.environ.get("LD_PRELOAD", ""):
        return None
    if not _load.cache_info().currsize and "mlx.core" in sys.modules:
        return LATE
    if _load():
        return None
    return f"MLX's own BLAS computes, many times slower than OpenBLAS; {HINT}"


@functools.cache
def _load() -> bool:
    """Whether OpenBLAS is there. The loader's own paths are searched, as for any library."""
    for name in NAMES:
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return True
    return False
