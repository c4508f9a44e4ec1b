"""The simulated device: inside, `mps` exists, and every operator on it is judged."""

import contextlib
from types import TracebackType
from typing import Any

import torch

from pippin.engines.torch.mps.calls import Calls
from pippin.engines.torch.mps.disguise import disguise
from pippin.engines.torch.mps.kernels import Kernels
from pippin.engines.torch.mps.rules import Rules
from pippin.engines.torch.mps.state import State
from pippin.engines.torch.mps.verdicts import Report


class Simulator:
    """A context in which a program runs as on a Mac; `report` tells what a Mac would not do.

    `strict` raises MpsOffence at the first offence. `base` "meta" computes shapes alone: models of
    any size, in seconds. It judges what is executed; numbers, memory and speed it does not see.
    """

    def __init__(self, rules: Rules, *, strict: bool = False, base: str = "cpu") -> None:
        self.report = Report(strict=strict)
        self._state = State(rules=rules, report=self.report, base=torch.device(base))
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Simulator":
        state = self._state
        self._stack.enter_context(disguise(state.tags, lambda: state.raw > 0))
        self._stack.enter_context(Kernels(state))
        self._stack.enter_context(Calls(state))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return self._stack.__exit__(kind, error, trace)

    def put(self, tree: Any) -> Any:
        """Say that a module or a tree of tensors lies on MPS, without a copy; the tree."""
        return self._state.put(tree)
