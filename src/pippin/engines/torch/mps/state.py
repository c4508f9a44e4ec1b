"""What the two modes of a simulation share: rules, report, tags, and what is going on just now."""

import contextlib
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pippin.engines.torch.mps.rules import Rules
from pippin.engines.torch.mps.tags import MPS, Tags, dtypes, tensors
from pippin.engines.torch.mps.verdicts import Report, Verdict

TAGS = Tags()  # tensors outlive a simulation in caches, and take their tag along


@dataclass(kw_only=True)
class State:
    """`base` is where data really lies: `cpu`, or `meta` for shapes alone.

    `target` is the device that the innermost Python call asked for. While `muted` nothing is
    judged, while `raw` tensors tell their real device.
    """

    rules: Rules
    report: Report
    base: torch.device
    tags: Tags = field(default_factory=lambda: TAGS)
    target: torch.device | None = None
    muted: int = 0
    raw: int = 0

    def judge(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Add the call's verdicts to the report."""
        if self.muted:
            return
        name, kinds = str(operator), dtypes((args, kwargs))
        verdict = self.rules.operator(operator)
        self.report.add(name, kinds, verdict)
        if verdict.fine:
            for found in self.rules.call(operator, args, kwargs):
                self.report.add(name, kinds, found)

    def add(self, name: str, verdict: Verdict, tree: Any = ()) -> None:
        """Add one verdict on something that is no operator."""
        if not self.muted:
            self.report.add(name, dtypes(tree), verdict)

    def place(self, tree: Any, device: torch.device) -> Any:
        """Say that a tree's tensors lie on `device`; the tree."""
        for tensor in tensors(tree):
            if device.type != "mps":
                self.tags.drop(tensor)
                continue
            self.tags.add(tensor)
            self._judge_dtype(tensor)
        return tree

    def put(self, tree: Any) -> Any:
        """Say that a module or a tree of tensors lies on MPS, without a copy."""
        if isinstance(tree, torch.nn.Module):
            self.place([*tree.parameters(), *tree.buffers()], MPS)
            return tree
        return self.place(tree, MPS)

    def _judge_dtype(self, tensor: Tensor) -> None:
        verdict = self.rules.dtype(tensor.dtype)
        if verdict is not None:
            self.add("a tensor", verdict, tensor)

    @contextlib.contextmanager
    def aimed(self, target: torch.device | None) -> Generator[None]:
        """Inside, what is created lies on `target`."""
        before, self.target = self.target, target
        try:
            yield
        finally:
            self.target = before

    @contextlib.contextmanager
    def quiet(self) -> Generator[None]:
        """Inside, nothing is judged."""
        self.muted += 1
        try:
            yield
        finally:
            self.muted -= 1

    @contextlib.contextmanager
    def undisguised(self) -> Generator[None]:
        """Inside, tensors tell their real device."""
        self.raw += 1
        try:
            yield
        finally:
            self.raw -= 1
