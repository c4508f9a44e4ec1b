"""What this machine offers: chip, memory, engines, dtypes; no framework is imported to find out."""

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from pippin.engines import ENGINES
from pippin.engines.host import cores

GIB = 2**30
# Of the memory that CPU and GPU share, what Metal recommends to take at most (see chips.toml).
SMALL, SHARE_SMALL, SHARE_LARGE = 32 * GIB, 2 / 3, 3 / 4
OLDEST_MACOS = 14  # on which PyTorch computes on the GPU, in bfloat16 too
# Packages without which an engine leaves an accelerator alone.
_PLUGINS = {
    ("cuda", "jax"): ("jax-cuda12-plugin", "jax-cuda13-plugin"),
    ("cuda", "mlx"): ("mlx-cuda-12", "mlx-cuda-13"),
    ("mps", "jax"): ("jax-mps",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """A device besides the CPU, `cuda` or `mps`. Memory in bytes; mps shares the host's."""

    kind: str
    name: str
    memory_total: int
    memory_available: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One machine. Memory in bytes, limits of its container respected; `gflops` is measured.

    `gflops` is the rate of a float32 matrix product on all cores. `engines` are the installed ones,
    `accelerated` those of them that compute on the accelerator.
    `compiles` tells that kernels for its CPU can be compiled. `lacking` says why a GPU that is
    there cannot be used. `elsewhere` marks a machine that is not here, whose disk and speed nobody
    knows.
    """

    chip: str
    system: str
    cores: int
    memory_total: int
    memory_available: int
    shared_memory: bool
    native_bfloat16: bool
    gflops: float
    engines: tuple[str, ...]
    accelerator: Accelerator | None = None
    accelerated: tuple[str, ...] = ("mlx", "torch")
    compiles: bool = False
    lacking: str = ""
    elsewhere: bool = False

    def devices(self, engine: str) -> list[str]:
        """The devices an engine computes on here, best first."""
        best = [self.accelerator.kind] if self.accelerator and engine in self.accelerated else []
        return [*best, "cpu"]

    def device(self, wanted: str, engine: str = "torch") -> str:
        """`auto` as the best device that the engine has here."""
        return self.devices(engine)[0] if wanted == "auto" else wanted


def find_machine() -> Machine:
    """Look at the machine; takes a few hundredths of a second."""
    total, available = memory()
    chip = chip_name()
    accelerator = _mps(chip, total, available) or _cuda()
    return Machine(
        chip=chip,
        system=f"{platform.system()} {platform.machine()}",
        cores=cores(),
        memory_total=total,
        memory_available=available,
        shared_memory=_apple_silicon(),
        native_bfloat16=native_bfloat16(),
        gflops=measure_gflops(),
        engines=tuple(name for name in ENGINES if _installed(name)),
        accelerator=accelerator,
        accelerated=_accelerated(accelerator.kind if accelerator else "mps"),
        compiles=platform.system() == "Linux" and shutil.which("g++") is not None,
        lacking="" if accelerator else why_no_gpu(),
    )


def chip_name() -> str:
    """The processor's own name."""
    if platform.system() == "Darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or "Apple"
    match = re.search(r"^model name\s*:\s*(.+)$", _text("/proc/cpuinfo"), re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def memory() -> tuple[int, int]:
    """(total, available) bytes, the smaller of the machine's and the container's."""
    host = psutil.virtual_memory()
    limit, used = _container("memory.max", "memory.current")
    if limit is None:
        limit, used = _container("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")
    if limit is None or limit >= host.total:
        return host.total, host.available
    return limit, max(0, min(host.available, limit - (used or 0) + _reclaimable()))


def footprint() -> int:
    """Bytes that this process holds, swapped or compressed ones too."""
    if platform.system() == "Darwin":
        return _phys_footprint() or psutil.Process().memory_info().rss
    held = re.findall(r"^Vm(?:RSS|Swap):\s*(\d+) kB$", _text("/proc/self/status"), re.MULTILINE)
    return sum(map(int, held)) * 1024 or psutil.Process().memory_info().rss


def _phys_footprint() -> int:
    """What macOS itself counts, the GPU's share of this process included; 0 where it is silent.

    proc_pid_rusage fills rusage_info_v0 (sys/resource.h): a UUID of 16 bytes, then ten counts.
    """
    info = (ctypes.c_uint64 * 12)()
    ask = getattr(ctypes.CDLL(None), "proc_pid_rusage", None)
    if ask is None or ask(os.getpid(), 0, ctypes.byref(info)) != 0:
        return 0
    return int(info[9])


def working_set(memory: int) -> int:
    """Bytes that a GPU sharing `memory` bytes may take by Metal's recommendation."""
    return int(memory * (SHARE_SMALL if memory <= SMALL else SHARE_LARGE))


def native_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 itself; elsewhere it is slower than float32."""
    if platform.system() == "Darwin":
        return _output("sysctl", "-n", "hw.optional.arm.FEAT_BF16") == "1"
    match = re.search(r"^(?:flags|Features)\s*:(.+)$", _text("/proc/cpuinfo"), re.MULTILINE)
    flags = set(match[1].split()) if match else set()
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


def measure_gflops(size: int = 768) -> float:
    """float32 matrix products on all cores, 1e9 operations a second, the best of three."""
    a = np.full((size, size), 0.5, np.float32)
    seconds = min(_timed(a) for _ in range(3))
    return 2 * size**3 / seconds / 1e9


def _timed(a: np.ndarray) -> float:
    start = time.perf_counter()
    a @ a
    return max(time.perf_counter() - start, 1e-9)


def _installed(engine: str) -> bool:
    return importlib.util.find_spec(engine) is not None


def _accelerated(kind: str) -> tuple[str, ...]:
    """The engines that compute on this kind of accelerator."""
    needs = {engine: _PLUGINS.get((kind, engine), ()) for engine in ENGINES}
    return tuple(name for name, any_of in needs.items() if not any_of or any(map(_there, any_of)))


def _there(package: str) -> bool:
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


def _apple_silicon() -> bool:
    return platform.system() == "Darwin" and platform.machine() == "arm64"


def why_no_gpu() -> str:
    """Why a GPU that seems to be there cannot be used; empty where none is."""
    if platform.system() == "Darwin":
        if not _apple_silicon():
            translated = _output("sysctl", "-n", "sysctl.proc_translated") == "1"
            return "this Python is for Intel and runs under Rosetta" if translated else ""
        return f"macOS {platform.mac_ver()[0]} is older than {OLDEST_MACOS}.0" if _too_old() else ""
    if not shutil.which("nvidia-smi"):
        return ""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']} hides it"
    return "the installed PyTorch is a build for CPUs" if _cpu_build("torch") else ""


def _too_old() -> bool:
    major = platform.mac_ver()[0].partition(".")[0]
    return major.isdigit() and int(major) < OLDEST_MACOS


def _mps(chip: str, total: int, available: int) -> Accelerator | None:
    if not _apple_silicon() or _too_old():
        return None
    free = min(available, working_set(total))
    return Accelerator(kind="mps", name=chip, memory_total=total, memory_available=free)


def _cuda() -> Accelerator | None:
    """The first visible NVIDIA device, where the installed torch can use it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if visible in ("", "-1") or not shutil.which("nvidia-smi") or _cpu_build("torch"):
        return None
    query = ("--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits")
    name, *figures = _output("nvidia-smi", f"--id={visible}", *query).partition("\n")[0].split(", ")
    if len(figures) != 2 or not all(f.strip().isdigit() for f in figures):
        return None
    total, free = (int(f) * 2**20 for f in figures)
    return Accelerator(kind="cuda", name=name, memory_total=total, memory_available=free)


def _cpu_build(package: str) -> bool:
    try:
        return importlib.metadata.version(package).endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


def _container(limit: str, used: str) -> tuple[int | None, int | None]:
    root = Path("/sys/fs/cgroup")
    figures = (_text(str(root / name)).strip() for name in (limit, used))
    bytes_limit, bytes_used = (int(f) if f.isdigit() else None for f in figures)
    return bytes_limit, bytes_used


def _reclaimable() -> int:
    """File cache counted as used by the container, which the kernel gives back on demand."""
    match = re.search(r"^inactive_file (\d+)$", _text("/sys/fs/cgroup/memory.stat"), re.MULTILINE)
    return int(match[1]) if match else 0


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
