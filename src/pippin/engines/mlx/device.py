"""Which device and dtype the engine computes with, and how much memory it took."""

from importlib.metadata import version

import mlx.core as mx

from pippin.engines.host import cores, peak_resident
from pippin.errors import UsageError
from pippin.figures import counted

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
# Freed buffers that MLX may keep for the next step where memory is shared with everything else;
# without a limit it keeps all of them.
CACHE_BYTES = 1 << 30


def available() -> list[str]:
    """The devices that are here, best first. An Apple GPU goes by `mps`, as in PyTorch."""
    here = {"cuda": mx.cuda.is_available(), "mps": mx.metal.is_available(), "cpu": True}
    return [name for name, present in here.items() if present]


def pick_device(name: str) -> str:
    """The device behind `auto`, `cpu`, `cuda` or `mps`; UsageError where it is not there.

    MLX computes on it from here on.
    """
    here = available()
    if name != "auto" and name not in here:
        raise UsageError(
            f"device {name} is not available to MLX {version('mlx')}",
            f"devices here: {', '.join(here)}; choose one of them, or auto",
        )
    picked = here[0] if name == "auto" else name
    mx.set_default_device(mx.cpu if picked == "cpu" else mx.gpu)
    if picked == "mps":
        mx.set_cache_limit(CACHE_BYTES)
    return picked


def describe(device: str) -> str:
    """The device in words, e.g. `cpu (2 cores)`."""
    if device == "cpu":
        return f"cpu ({counted(cores(), 'core')})"
    return f"{device} ({mx.device_info().get('device_name', 'GPU')})"


def pick_dtype(name: str, device: str) -> mx.Dtype:
    """`auto` is bfloat16 on a GPU; on a CPU float32, which alone reaches a BLAS there."""
    if name == "auto":
        return mx.float32 if device == "cpu" else mx.bfloat16
    if name not in DTYPES:
        raise UsageError(f"dtype {name} does not exist in MLX", f"use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def dtype_name(dtype: mx.Dtype) -> str:
    """`float32` of mx.float32."""
    return str(dtype).removeprefix("mlx.core.")


def peak_memory(device: str) -> int:
    """Bytes: the GPU allocator's peak, or the process's peak resident set on a CPU."""
    if device != "cpu":
        return mx.get_peak_memory()
    return peak_resident()
