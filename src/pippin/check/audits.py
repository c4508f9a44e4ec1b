"""Judging a model by another device's rules: what an audit is asked, what it answers."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

Outcome: TypeAlias = Literal["fine", "known wrong", "fails", "error"]

# Each module has `model(folder, ask)` and `architectures(ask)`, as `Auditor` says.
AUDITS = {
    "mps": "pippin.engines.torch.mps",
}
CHIPS = ("m1", "m2", "m3", "m4", "m5")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """Under whose rules: a framework's version (the installed one), a chip family (any).

    `strict` raises at the first offence. `tokens` is batch x length of the training step.
    """

    version: str | None = None
    chip: str | None = None
    strict: bool = False
    tokens: int = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """An operator that the device does not run, or gets wrong; `where` is file:line."""

    kind: str
    operator: str
    dtypes: str
    where: str
    count: int
    why: str
    remedy: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Audited:
    """One program of one subject: operators met, their calls, what is wrong; `error` ended it."""

    subject: str
    program: str
    operators: int
    calls: int
    fails: tuple[Trouble, ...]
    known_wrong: tuple[Trouble, ...]
    error: str = ""

    @classmethod
    def failed(cls, subject: str, program: str, error: str) -> "Audited":
        """A program of which nothing is known but its end."""
        return cls(
            subject=subject,
            program=program,
            operators=0,
            calls=0,
            fails=(),
            known_wrong=(),
            error=error,
        )

    @property
    def outcome(self) -> Outcome:
        """The worst that was met. An error is the program's own: the rules found nothing before."""
        if self.fails:
            return "fails"
        if self.error:
            return "error"
        return "known wrong" if self.known_wrong else "fine"

    def as_json(self) -> dict[str, Any]:
        """All fields and the outcome."""
        return {**asdict(self), "outcome": self.outcome}


class Auditor(Protocol):
    """A module of AUDITS."""

    def model(self, folder: Path, ask: Ask) -> Iterator[Audited]:
        """A model folder: a LoRA step, generation, evaluation, quantized products."""
        ...

    def architectures(self, ask: Ask) -> Iterator[Audited]:
        """Tiny random models of the most used architectures."""
        ...
