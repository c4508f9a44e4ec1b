"""What a running stage yields. The console draws them, `--json` prints them, tests read them."""

from dataclasses import asdict, dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """A stage begins. `total` counts `unit`s of progress to come; None where it is not known."""

    stage: str
    title: str
    total: int | None = None
    unit: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """`done` of the stage's total units; `values` are the figures worth showing beside the bar."""

    stage: str
    done: int
    values: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """Measured figures that belong in the record (loss curves, memory)."""

    stage: str
    step: int
    values: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """A derived default, a replacement, something dropped or cut: never done silently."""

    stage: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A stage is on disk at `folder`; `skipped` when it was there, made from the same inputs."""

    stage: str
    folder: str
    summary: dict[str, Any]
    skipped: bool = False


Event: TypeAlias = Started | Progress | Metric | Notice | Finished


def to_json(event: Event) -> dict[str, Any]:
    """The event as a JSON object, its kind under `event`."""
    return {"event": type(event).__name__.lower(), **asdict(event)}
