"""The machine as engines that compute on its CPU tell it."""

import ctypes
import os
import resource
import sys
from pathlib import Path

from pippin.errors import UsageError

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # microseconds of a period, or `max`, and the period
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt, malloc.h
LARGE = 4 << 20  # bytes; smaller ones cost 6 to 10 % of a step's time, larger ones save no memory
PRODUCTS = 64  # shapes of products; a step of one length has about 40


def cores() -> int:
    """Cores this process may use: its affinity, and the container's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    limit = QUOTA.read_text() if QUOTA.is_file() else ""
    quota, _, period = limit.partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        allowed = min(allowed or 1, max(1, int(quota) // int(period)))
    return allowed or 1


def peak_resident() -> int:
    """Bytes: the process's peak resident set."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def steady_heap() -> None:
    """Give blocks of `LARGE` bytes and more back to the system when they are freed.

    glibc by itself keeps blocks of up to 32 MiB in a heap that frays as the lengths of batches
    vary: a training of 0.8 GB grew to 0.94 or 1.04 GB. The heap itself stays: its pages would be
    asked for anew in every step. oneDNN keeps code for every length it has met, 20 MB each for
    a model of 30 layers: here for the last ones. Elsewhere nothing is changed.
    """
    if sys.platform != "linux":
        return
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(PRODUCTS))
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(M_MMAP_THRESHOLD, LARGE)
            mallopt(M_TRIM_THRESHOLD, 1 << 30)


def refuse_several(name: str) -> None:
    """Raise UsageError in one of several processes that were launched together.

    Each would do all the work, and write into the others' run. The first of those around MLX works
    alone where something else computes, e.g. a deployed file's check.
    """
    mlx, other = os.environ.get("MLX_RANK"), os.environ.get("RANK", "")
    if mlx not in (None, "", "0") or (
        other.isdecimal() and os.environ.get("WORLD_SIZE", "1") not in ("", "1")
    ):
        raise UsageError(
            f"engine {name} works in one process; this one is number "
            f"{mlx or other} of several that were launched together",
            'start pippin without a launcher, or set model.engine = "mlx" and use mlx.launch',
        )
