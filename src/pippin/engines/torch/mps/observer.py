"""The real device: a program runs there, and what its own dispatcher refuses is reported.

The same report as the simulator's, for a Mac: its verdicts come from the device, not from a table.
"""

import re
import warnings
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pippin.engines.torch.mps.rules import Rules
from pippin.engines.torch.mps.tags import dtypes, tensors
from pippin.engines.torch.mps.verdicts import NATIVE, Report, Verdict

FALLS_BACK = re.compile(r"fall back to run on the CPU|falling back to (?:run on )?(?:the )?CPU")
MISSING = re.compile(
    r"not (?:currently )?implemented for|Could not run|not supported (?:on|for)|kernel registered"
)


class Observer(TorchDispatchMode):
    """A context in which every operator on `device` is watched; `report` tells what it refused.

    `strict` raises MpsOffence at the first offence. `rules` add the calls that run and are known to
    give wrong numbers on this chip and version.
    """

    def __init__(self, rules: Rules, *, strict: bool = False, device: str = "mps") -> None:
        super().__init__()
        self.rules, self.kind = rules, device
        self.report = Report(strict=strict)
        self._always = torch.is_warn_always_enabled()

    def __enter__(self) -> "Observer":
        """From here on PyTorch warns of every operator that leaves the GPU, not of the first."""
        torch.set_warn_always(True)
        super().__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        torch.set_warn_always(self._always)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """The operator's own result, or its own refusal."""
        kwargs = kwargs or {}
        if not self._here((args, kwargs)):
            return func(*args, **kwargs)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                out = func(*args, **kwargs)
            except (RuntimeError, TypeError) as error:
                self._add(func, (args, kwargs), _refused(error))
                raise
        self._judge(func, args, kwargs, [str(w.message) for w in told])
        return out

    def _here(self, tree: tuple[Any, dict[str, Any]]) -> bool:
        asked = tree[1].get("device")
        named = asked is not None and torch.device(asked).type == self.kind
        return named or any(x.device.type == self.kind for x in tensors(tree))

    def _judge(self, func: Any, args: Any, kwargs: Any, told: list[str]) -> None:
        left = [text for text in told if FALLS_BACK.search(text)]
        verdicts = [Verdict(kind="fallback", why=_line(text)) for text in left] or [NATIVE]
        for verdict in (*verdicts, *self._known(func, args, kwargs)):
            self._add(func, (args, kwargs), verdict)

    def _known(self, func: Any, args: Any, kwargs: Any) -> Iterator[Verdict]:
        """Limits are the device's own to tell; only what it gets wrong is taken from the rules."""
        found = self.rules.call(func, args, kwargs)
        return (verdict for verdict in found if verdict.kind == "known wrong")

    def _add(self, func: Any, tree: Any, verdict: Verdict) -> None:
        self.report.add(str(func), dtypes(tree), verdict)


def _refused(error: Exception) -> Verdict:
    text = _line(str(error))
    if MISSING.search(text):
        slow = "PYTORCH_ENABLE_MPS_FALLBACK=1 runs it on the CPU, slowly"
        return Verdict(kind="unsupported", why=text, remedy=slow)
    if isinstance(error, TypeError) and "dtype" in text:
        return Verdict(kind="dtype", why=text, remedy="use float32")
    return Verdict(kind="limit", why=text)


def _line(text: str) -> str:
    """The first sentence: PyTorch's refusals go on with advice."""
    return text.strip().partition("\n")[0].partition(". ")[0][:200]
