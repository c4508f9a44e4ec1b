"""Which device and dtype JAX computes with, and how much memory it took."""

import jax
import jax.numpy as jnp

from pippin.engines.host import cores, peak_resident
from pippin.errors import UsageError
from pippin.figures import counted

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
PLATFORMS = ("cuda", "mps", "cpu")  # best first


def available() -> list[str]:
    """The devices that are here, best first."""
    return [name for name in PLATFORMS if _find(name) is not None]


def pick_device(name: str) -> jax.Device:
    """The first device behind `auto`, `cpu`, `cuda` or `mps`; UsageError where it is not there."""
    here = available()
    device = _find(here[0] if name == "auto" else name)
    if device is None:
        extra = {"cuda": "pip install 'jax[cuda13]'; ", "mps": "pip install jax-mps; "}
        raise UsageError(
            f"device {name} is not available to JAX {jax.__version__}",
            f"{extra.get(name, '')}devices here: {', '.join(here)}; set model.device to one of "
            "them, or to auto",
        )
    return device


def describe(device: jax.Device) -> str:
    """The device in words, e.g. `cpu (2 cores)`."""
    if device.platform == "cpu":
        return f"cpu ({counted(cores(), 'core')})"
    kind = "cuda" if device.platform == "gpu" else device.platform
    return f"{kind} ({device.device_kind})"


def pick_dtype(name: str, device: jax.Device) -> str:
    """`auto` is bfloat16 on an accelerator, float32 on a CPU: XLA computes bfloat16 through it."""
    if name == "auto":
        return "float32" if device.platform == "cpu" else "bfloat16"
    if name not in DTYPES:
        raise UsageError(
            f"dtype {name} does not exist in JAX here", f"use auto, {', '.join(DTYPES)}"
        )
    return name


def peak_memory(device: jax.Device) -> int:
    """Bytes: the device allocator's peak, or the process's peak resident set on a CPU."""
    figures = device.memory_stats() or {}
    if "peak_bytes_in_use" in figures:
        return figures["peak_bytes_in_use"]
    return peak_resident()


def _find(name: str) -> jax.Device | None:
    if name not in PLATFORMS:
        return None
    try:
        return jax.devices(name)[0]
    except RuntimeError:  # JAX's way of saying that a platform is not there
        return None
