"""What Python code sees while a program is simulated: devices by tag, a torch.mps that answers."""

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor

from pippin.engines.torch.mps.tags import MPS, Tags

MEMORY = 64 << 30  # what the simulated GPU recommends at most
SILENT = ("synchronize", "empty_cache", "manual_seed", "seed", "set_per_process_memory_fraction")
OWN_DEVICE = torch._C.TensorBase.device


@contextlib.contextmanager
def disguise(tags: Tags, hidden: Callable[[], bool]) -> Generator[None]:
    """Inside, `tensor.device` tells the tag; while `hidden()` the device that kernels must see."""

    def device(tensor: Tensor) -> torch.device:
        return MPS if not hidden() and tensor in tags else OWN_DEVICE.__get__(tensor)

    def on_cpu(tensor: Tensor) -> bool:
        return tensor not in tags and OWN_DEVICE.__get__(tensor).type == "cpu"

    with contextlib.ExitStack() as stack:
        patch = _patcher(stack)
        patch(torch.Tensor, "device", property(device))
        patch(torch.Tensor, "is_mps", property(lambda tensor: tensor in tags))
        patch(torch.Tensor, "is_cpu", property(on_cpu))
        patch(torch.backends.mps, "is_available", lambda: True)
        patch(torch.backends.mps, "is_built", lambda: True)
        patch(torch.backends.mps, "is_macos_or_newer", lambda major, minor=0: True)
        for name, function in _module().items():
            patch(torch.mps, name, function)
        patch(torch, "Event", Event)
        patch(torch, "Generator", Generator_)
        patch(torch.autocast, "__init__", _autocast(torch.autocast.__init__))
        stack.enter_context(_math_attention())
        yield


def _patcher(stack: contextlib.ExitStack) -> Callable[[Any, str, Any], None]:
    def patch(owner: Any, name: str, value: Any) -> None:
        own = vars(owner)
        if name in own:
            stack.callback(setattr, owner, name, own[name])
        else:
            stack.callback(delattr, owner, name)
        setattr(owner, name, value)

    return patch


def _module() -> dict[str, Callable[..., Any]]:
    def nothing(*_: Any) -> None:
        return None

    return {
        **dict.fromkeys(SILENT, nothing),
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "current_allocated_memory": lambda: 0,
        "driver_allocated_memory": lambda: 0,
        "recommended_max_memory": lambda: MEMORY,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    }


class Event:
    """A torch.Event whose work is done already."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None:
        """Nothing to record."""

    wait = synchronize = record

    def query(self) -> bool:
        """Done."""
        return True

    def elapsed_time(self, other: Any) -> float:
        """No time."""
        return 0.0


class Generator_(torch._C.Generator):  # noqa: N801 - stands in for torch.Generator
    """A generator on the CPU, whatever was asked."""

    def __new__(cls, device: Any = "cpu") -> "Generator_":
        """`device` mps becomes cpu."""
        own: Any = torch._C.Generator
        return own.__new__(cls, "cpu" if is_mps(device) else device)


def _autocast(own: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        own(self, "cpu" if device_type == "mps" else device_type, *args, **kwargs)

    return init


@contextlib.contextmanager
def _math_attention() -> Generator[None]:
    """With gradients MPS computes attention spelled out; it has none of the CPU's kernels."""
    cuda = torch.backends.cuda
    before = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()
    cuda.enable_flash_sdp(False)
    cuda.enable_mem_efficient_sdp(False)
    try:
        yield
    finally:
        cuda.enable_flash_sdp(before[0])
        cuda.enable_mem_efficient_sdp(before[1])


def is_mps(value: Any) -> bool:
    """Whether it names the device: torch.device or text."""
    if isinstance(value, torch.device):
        return value.type == "mps"
    return isinstance(value, str) and value in ("mps", "mps:0")


def is_cpu(value: Any) -> bool:
    """The same for the CPU."""
    if isinstance(value, torch.device):
        return value.type == "cpu"
    return isinstance(value, str) and value == "cpu"
