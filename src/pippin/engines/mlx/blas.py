"""OpenBLAS in the place of the reference BLAS that MLX's Linux wheel brings along.

The wheel's symbols are the standard ones, so a library that is loaded before and globally wins.
"""

import ctypes
import functools
import sys

NAMES = ("libopenblas.so.0", "libopenblasp.so.0")
HINT = "apt install libopenblas0-pthread (Debian, Ubuntu), dnf install openblas-threads (Fedora)"


def preload() -> None:
    """Load OpenBLAS for the MLX that is imported next; nothing where MLX needs none."""
    if sys.platform == "linux" and "mlx.core" not in sys.modules:
        _load()


def notice() -> str | None:
    """What a run on a Linux CPU is told where OpenBLAS is missing."""
    if sys.platform != "linux" or _load():
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
