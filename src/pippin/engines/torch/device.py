"""Which device and dtype the engine computes with, and how much memory it took."""

import torch

from pippin.engines.host import cores, peak_resident
from pippin.errors import UsageError
from pippin.figures import counted
from pippin.machine import why_no_gpu

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def available() -> list[str]:
    """The devices that are here, best first."""
    here = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    return [name for name, present in here.items() if present]


def pick_device(name: str) -> torch.device:
    """The device behind `auto`, `cpu`, `cuda` or `mps`; UsageError where it is not there."""
    here = available()
    if name != "auto" and name not in here:
        raise UsageError(
            f"device {name} is not available to PyTorch {torch.__version__}{_why_not(name)}",
            f"devices here: {', '.join(here)}; choose one of them, or auto",
        )
    return torch.device(here[0] if name == "auto" else name)


def _why_not(name: str) -> str:
    """The reason, where one is known."""
    if name == "mps" and not torch.backends.mps.is_built():
        return ", which was built without MPS"
    if name == "cuda" and not torch.backends.cuda.is_built():
        return ", which was built without CUDA"
    return f": {reason}" if name in ("cuda", "mps") and (reason := why_no_gpu()) else ""


def describe(device: torch.device) -> str:
    """The device in words, e.g. `cpu (2 cores)`."""
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    if device.type == "mps":
        return "mps (Apple GPU)"
    return f"cpu ({counted(cores(), 'core')})"


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the device computes it natively, else float32.

    float64 is taken on a CPU, for tests against exact references.
    """
    if name == "auto":
        return torch.bfloat16 if native_bfloat16(device) else torch.float32
    if name == "float64" and device.type != "mps":
        return torch.float64
    if name not in DTYPES:
        raise UsageError(
            f"dtype {name} does not exist on {device.type}", f"use auto, {', '.join(DTYPES)}"
        )
    return DTYPES[name]


def native_bfloat16(device: torch.device) -> bool:
    """Whether matrix products in bfloat16 run in hardware rather than through float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "mps":
        return True
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_arm_bf16_supported")
    return any(getattr(torch.cpu, probe, bool)() for probe in probes)


def peak_memory(device: torch.device) -> int:
    """Bytes: CUDA's allocator peak, MPS's driver figure, or the process's peak resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    return peak_resident()
