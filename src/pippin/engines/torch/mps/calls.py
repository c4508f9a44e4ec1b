"""Calls of PyTorch's Python functions: devices are rewritten, and what hides in C++ is judged here.

MPS has kernels that a composite picks by `#ifdef`, invisible to a dispatch mode on a CPU.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pippin.engines.torch.mps.disguise import is_cpu, is_mps
from pippin.engines.torch.mps.known import ATTENTION, Call
from pippin.engines.torch.mps.state import State
from pippin.engines.torch.mps.tags import CPU, MPS, tensors
from pippin.engines.torch.mps.verdicts import Verdict

aten = torch.ops.aten
CREATORS = ("tensor", "as_tensor", "asarray", "from_numpy", "scalar_tensor")
UNTOUCHED = ("_parse_to", "get_device_module")
HOST = Verdict(
    kind="host", why="numpy cannot read a tensor on MPS", remedy="call .cpu() before .numpy()"
)


class Calls(TorchFunctionMode):
    """Sees every call of a Python function of PyTorch."""

    def __init__(self, state: State) -> None:
        self.state = state

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """The function's own result, with devices as the program thinks they are."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in UNTOUCHED:
            return func(*args, **kwargs)
        if name in ("to", "cpu", "cuda") and args and isinstance(args[0], Tensor):
            return self._move(func, args, kwargs)
        special = _SPECIAL.get(func)
        if special and self.state.tags.any((args, kwargs)):
            return special(self, func, args, kwargs)
        return self._aimed(func, args, kwargs)

    def _aimed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call with its device rewritten to where the data really lies."""
        state, asked = self.state, [*args, kwargs.get("device")]
        target = MPS if any(map(is_mps, asked)) else CPU if any(map(is_cpu, asked)) else None
        if target == MPS:
            named = [isinstance(a, torch.device) and is_mps(a) for a in args]
            args = tuple(state.base if n else a for a, n in zip(args, named, strict=True))
            if is_mps(kwargs.get("device")):
                kwargs = {**kwargs, "device": state.base}
        elif target is None and state.tags.any((args, kwargs)):
            target = MPS  # composites make helpers where their inputs lie
        if target is None and state.target is None:
            return func(*args, **kwargs)
        with state.aimed(target):
            out = func(*args, **kwargs)
        if target is not None and getattr(func, "__name__", "") in CREATORS:
            state.place(out, target)
        return out

    def _move(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """`to` and `cpu`: a copy where the tag changes, else at most another dtype."""
        state, tensor = self.state, args[0]
        device, dtype, layout = _asked(func, args, kwargs)
        here = tensor in state.tags
        there = here if device is None else device.type == "mps"
        if device is not None and device.type == "meta":
            return func(*args, **kwargs)
        dtype = dtype or tensor.dtype
        if here != there and state.base.type == "meta":
            return self._between_shapes(tensor, dtype, there)
        if here == there:
            return Tensor.to(tensor, dtype, copy=kwargs.get("copy", False), **layout)
        with state.quiet():
            out = Tensor.to(tensor, dtype, copy=True, **layout)
        return state.place(out, MPS if there else CPU)

    def _between_shapes(self, tensor: Tensor, dtype: torch.dtype, there: bool) -> Tensor:
        if not there:
            return torch.zeros(tensor.shape, dtype=dtype)
        out = torch.empty_like(tensor, dtype=dtype, device="meta")
        self.state.tags.add(out)
        return out

    def _numpy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.state.add(f"Tensor.{func.__name__}", HOST, args[0])
        return func(*args, **kwargs)

    def _linear(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for found in self.state.rules.call(aten.linear.default, args, kwargs):
            self.state.add("aten.linear.default", found, (args, kwargs))
        return self._aimed(func, args, kwargs)

    def _attention(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Fused where no gradient is asked and nothing is dropped, else spelled out."""
        call = Call.of(aten.scaled_dot_product_attention.default, args, kwargs)
        if _tracked((args, kwargs)) or call["dropout_p"]:
            return self._aimed(func, args, kwargs)
        operator = getattr(aten, ATTENTION).default
        names = {a.name for a in operator._schema.arguments}
        values = {name: value for name, value in call.values.items() if name in names}
        return self._as(operator, values, func, args, kwargs)

    def _rms_norm(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _tracked((args, kwargs)):
            return self._aimed(func, args, kwargs)
        return self._as(aten._fused_rms_norm.default, {}, func, args, kwargs)

    def _lstm(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._as(aten._lstm_mps.default, {}, func, args, kwargs)

    def _svd(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._as(aten.linalg_svd.default, {}, func, args, kwargs)

    def _as(self, operator: Any, values: dict[str, Any], func: Any, args: Any, kwargs: Any) -> Any:
        """Judged as one operator; computed as it comes."""
        state, name = self.state, str(operator)
        state.add(name, state.rules.operator(operator), (args, kwargs))
        if values:
            for found in state.rules.call(operator, (), values):
                state.add(name, found, (args, kwargs))
        with state.quiet():
            return self._aimed(func, args, kwargs)


_SPECIAL: dict[Any, Callable[..., Any]] = {
    Tensor.numpy: Calls._numpy,
    Tensor.__array__: Calls._numpy,
    torch.nn.functional.linear: Calls._linear,
    torch.nn.functional.scaled_dot_product_attention: Calls._attention,
    torch.rms_norm: Calls._rms_norm,
    torch.lstm: Calls._lstm,
    torch.linalg.svd: Calls._svd,
    torch.svd: Calls._svd,
}


def _tracked(tree: Any) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors(tree))


def _asked(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.device | None, torch.dtype | None, dict[str, Any]]:
    """Device, dtype and memory format that a `to` asks for."""
    layout = {k: v for k, v in kwargs.items() if k == "memory_format" and v is not None}
    if getattr(func, "__name__", "") == "cpu":
        return CPU, None, layout
    values = [*args[1:], *kwargs.values()]
    other = next((v for v in values if isinstance(v, Tensor)), None)
    if other is not None:
        return other.device, other.dtype, layout
    dtype = next((v for v in values if isinstance(v, torch.dtype)), None)
    named = next((v for v in values if isinstance(v, torch.device | str)), None)
    return None if named is None else torch.device(named), dtype, layout
