"""What the rules say of an operator, and the list of what a program did that MPS would not."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from pippin.errors import PippinError

Fine: TypeAlias = Literal["native", "composite"]
Bad: TypeAlias = Literal[
    "fallback", "unsupported", "dtype", "limit", "mixed", "host", "known wrong"
]
Kind: TypeAlias = Fine | Bad
# Kinds that fail on a Mac or leave the GPU; `known wrong` runs and gives wrong numbers.
FAILS = ("fallback", "unsupported", "dtype", "limit", "mixed", "host")


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One judgement. `remedy` is the way round."""

    kind: Kind
    why: str = ""
    remedy: str = ""

    @property
    def fine(self) -> bool:
        """Whether it runs on the GPU as it should."""
        return self.kind in ("native", "composite")


NATIVE, COMPOSITE = Verdict(kind="native"), Verdict(kind="composite")


@dataclass(kw_only=True, slots=True)
class Offence:
    """An operator on some dtypes, why it is none for MPS, and where it was first met."""

    operator: str
    dtypes: str
    verdict: Verdict
    where: str
    count: int = 1

    def text(self) -> str:
        """One line for a person."""
        named = f"{self.operator} [{self.dtypes}]" if self.dtypes else self.operator
        return f"{self.verdict.kind}: {named} at {self.where}: {self.verdict.why}"


class MpsOffence(PippinError):
    """An operator that MPS does not run, met in strict mode."""


@dataclass(kw_only=True)
class Report:
    """Every operator that was judged. `strict` raises MpsOffence at the first offence."""

    strict: bool = False
    calls: int = 0
    operators: set[str] = field(default_factory=set)
    found: dict[tuple[str, str, Verdict], Offence] = field(default_factory=dict)

    def add(self, operator: str, dtypes: str, verdict: Verdict) -> None:
        """Count a call; keep it where it is an offence."""
        self.calls += 1
        self.operators.add(operator)
        if verdict.fine:
            return
        key = (operator, dtypes, verdict)
        if key in self.found:
            self.found[key].count += 1
            return
        offence = Offence(operator=operator, dtypes=dtypes, verdict=verdict, where=caller())
        self.found[key] = offence
        if self.strict:
            raise MpsOffence(offence.text(), verdict.remedy or "run this part on the CPU")

    def offences(self) -> list[Offence]:
        """What fails on MPS or leaves it."""
        return [o for o in self.found.values() if o.verdict.kind in FAILS]

    def known_wrong(self) -> list[Offence]:
        """What runs on MPS and is known to give wrong numbers."""
        return [o for o in self.found.values() if o.verdict.kind == "known wrong"]


def caller() -> str:
    """file:line of the nearest frame that is neither PyTorch's nor ours."""
    for path, line in _frames():
        return f"{path.rpartition('site-packages/')[2]}:{line}"
    return "unknown"


def _frames() -> Iterator[tuple[str, int]]:
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/torch/mps/" not in path and "site-packages/torch/" not in path:
            yield path, frame.f_lineno
        frame = frame.f_back
