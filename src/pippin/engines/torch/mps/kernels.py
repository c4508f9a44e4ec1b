"""Calls of operators: judged at the leaves, composites opened, results tagged."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from pippin.engines.torch.mps.disguise import is_mps
from pippin.engines.torch.mps.rules import MOVES, overload
from pippin.engines.torch.mps.state import State
from pippin.engines.torch.mps.tags import MPS, tensors
from pippin.engines.torch.mps.verdicts import Verdict

MIXED = Verdict(
    kind="mixed", why="tensors on the CPU and on MPS in one call", remedy="move both to one device"
)
# Operators that take an index, a source or a step count from the CPU.
MIXERS = ("copy_", "_to_copy", "index", "index_put", "index_put_", "_index_put_impl_")
MIXERS += ("_unsafe_index", "lift_fresh", "set_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_")
EXPLICIT = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


class Kernels(TorchDispatchMode):
    """Sees every operator below autograd."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state = state

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """The operator's own result, tagged as its inputs are."""
        state, kwargs = self.state, kwargs or {}
        if is_mps(kwargs.get("device")):
            with state.aimed(MPS):
                out = self.__torch_dispatch__(func, types, args, {**kwargs, "device": state.base})
            return state.place(out, MPS)
        inputs = tensors((args, kwargs))
        on_mps = [tensor in state.tags for tensor in inputs]
        whole = any(on_mps) and state.rules.whole(func)
        if has_kernel(func.name(), "CompositeImplicitAutograd") and not whole:
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        if not any(on_mps) and (inputs or state.target != MPS):
            return func(*args, **kwargs)
        self._judge(func, args, kwargs, on_mps)
        return self._run(func, args, kwargs)

    def _judge(self, func: Any, args: Any, kwargs: Any, on_mps: list[bool]) -> None:
        inputs = tensors((args, kwargs))
        name = func._schema.name.partition("::")[2]
        away = [x for x, on in zip(inputs, on_mps, strict=True) if not on and x.dim() > 0]
        if any(on_mps) and away and name not in MIXERS:
            self.state.add(str(func), MIXED, inputs)
        self.state.judge(func, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = self.state
        key = self._opened(func)
        if key is not None:
            with state.aimed(MPS), self:
                return state.place(func._op_dk(key, *args, **kwargs), MPS)
        with state.undisguised():
            out = _computed(func, args, kwargs, state.rules.operator(func).kind == "native")
        return state.place(out, MPS)

    def _opened(self, func: Any) -> Any:
        """The key under which a composite's own parts can be judged; None for a leaf."""
        state = self.state
        moves = func.is_view or overload(func) in MOVES
        if state.muted or moves or state.rules.operator(func).kind != "composite":
            return None
        name = next((key for key in EXPLICIT if has_kernel(func.name(), key)), None)
        return None if name is None else getattr(torch._C.DispatchKey, name)


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], native: bool) -> Any:
    """The CPU's result. A kernel that MPS alone has gives zeros of its shapes."""
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        text = str(error)
        if native and ("Could not run" in text or "not implemented for" in text):
            return _of_shapes(func, args, kwargs)
        if "Expected a value of type 'Tensor' for argument" in text:
            return func(*_as_tensors(func, args), **kwargs)
        raise


def _as_tensors(func: Any, args: tuple[Any, ...]) -> list[Any]:
    """Numbers as tensors where the operator takes nothing else."""
    kinds = [a.type for a in func._schema.arguments]
    return [
        torch.tensor(value)
        if isinstance(value, int | float | bool | complex) and isinstance(kind, torch.TensorType)
        else value
        for value, kind in zip(args, kinds, strict=False)
    ]


def _of_shapes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch._C.DisableTorchFunction(), FakeTensorMode() as mode:
        like = tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
        out = func(*like[0], **like[1])
    return tree_map_only(Tensor, lambda x: torch.zeros(x.size(), dtype=x.dtype), out)
