"""MPS's rules in one version of PyTorch on one chip: which operators, dtypes and arguments run."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from pippin.engines.torch.mps.known import WHEN, Call, Rule, refusals
from pippin.engines.torch.mps.known import load_rules as load_known
from pippin.engines.torch.mps.operators import Operators, load_operators
from pippin.engines.torch.mps.verdicts import COMPOSITE, NATIVE, Verdict

# c10/metal/common.h
DTYPES = frozenset(
    (
        *(torch.float16, torch.bfloat16, torch.float32, torch.complex32, torch.complex64),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
    )
)
# Convolutions pick MPS's own kernel inside; the others move or describe data and run anywhere.
CONVOLUTIONS = frozenset(
    ("convolution", "_convolution", "convolution_overrideable", "convolution_backward")
)
MOVES = frozenset(
    (
        *("copy_", "_to_copy", "detach", "alias", "lift", "lift_fresh", "_local_scalar_dense"),
        *("item", "is_pinned", "equal", "empty_like", "new_empty", "new_empty_strided", "resize_"),
        *("_unsafe_view", "record_stream", "is_same_size", "_has_compatible_shallow_copy_type"),
        *("set_.source_Tensor", "set_.source_Storage_storage_offset"),
    )
)


@dataclass(kw_only=True)
class Rules:
    """`chip` None stands for any chip: every known fault is told."""

    operators: Operators
    known: tuple[Rule, ...]
    chip: str | None
    _judged: dict[Any, Verdict] = field(default_factory=dict)

    def operator(self, operator: Any) -> Verdict:
        """Whether it has a kernel, whatever its arguments."""
        if operator not in self._judged:
            ours = operator.namespace in ("aten", "prims")
            self._judged[operator] = self._aten(operator) if ours else _custom(operator)
        return self._judged[operator]

    def whole(self, operator: Any) -> bool:
        """Whether MPS takes it as one call: a kernel of its own, or one that goes to the CPU."""
        table = self.operators
        return operator.namespace == "aten" and overload(operator) in table.native | table.fallback

    def dtype(self, dtype: torch.dtype) -> Verdict | None:
        """Why a tensor of this dtype cannot be there."""
        if dtype in DTYPES:
            return None
        name = str(dtype).removeprefix("torch.")
        return Verdict(kind="dtype", why=f"{name} does not exist on MPS", remedy="use float32")

    def call(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[Verdict]:
        """What is wrong with these arguments."""
        call = Call.of(operator, args, kwargs)
        for why in refusals(call):
            yield Verdict(kind="limit", why=f"MPS refuses {why}")
        for rule in self.known:
            if WHEN[rule.when](call):
                yield rule.verdict

    def _aten(self, operator: Any) -> Verdict:
        name, table = overload(operator), self.operators
        if name in table.fallback:
            return Verdict(kind="fallback", why="runs on the CPU, with copies both ways")
        if name in table.gaps:
            return Verdict(kind="unsupported", why="its kernel has no part for MPS")
        if name in CONVOLUTIONS or name in table.native:
            return NATIVE
        if name in MOVES or operator.is_view or name in table.composite:
            return COMPOSITE
        why = f"no kernel for MPS in PyTorch {table.version}"
        slow = "PYTORCH_ENABLE_MPS_FALLBACK=1 runs it on the CPU, slowly"
        update = f"update PyTorch to {table.later[name]}; " if name in table.later else ""
        return Verdict(kind="unsupported", why=why, remedy=update + slow)


def overload(operator: Any) -> str:
    """`add.Tensor`, or `relu` where it has no overload name."""
    schema = operator._schema
    name = schema.name.partition("::")[2]
    return f"{name}.{schema.overload_name}" if schema.overload_name else name


def _custom(operator: Any) -> Verdict:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    if has(operator.name(), "MPS"):
        return NATIVE
    if any(has(operator.name(), f"Composite{kind}Autograd") for kind in ("Explicit", "Implicit")):
        return COMPOSITE
    return Verdict(kind="unsupported", why=f"{operator.namespace} has no kernel for MPS")


def make_rules(version: str | None = None, chip: str | None = None) -> Rules:
    """The rules of PyTorch `version` (the installed one), on a chip family such as `m1`."""
    operators = load_operators(version)
    known = tuple(rule for rule in load_known() if rule.holds(operators.version, chip))
    return Rules(operators=operators, known=known, chip=chip)
