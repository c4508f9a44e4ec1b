"""How events look: bars in a terminal, sparse lines in a pipe, JSON objects, or nothing."""

import json
import time
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console as Rich
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.text import Text

from pippin import events
from pippin.events import Event, Finished, Notice, Started, to_json
from pippin.figures import counted, duration_text, figure_text

# Figures worth a place in a line, the most telling first, and their short names.
SHOWN = {
    "loss": "loss",
    "valid_loss": "valid loss",
    "kl": "KL",
    "top1": "top-1",
    "exact_match": "exact",
    "gain_kept": "gain kept",
    "tokens_per_second": "",
    "size_bytes": "",
    "bits_per_weight": "bits/weight",
    "peak_memory_bytes": "",
    "memory_bytes": "",
}
SECONDS_BETWEEN_LINES = 15
NAME, INDENT, BAR = 28, 4, 10  # columns of a step's name, before a notice, of the smallest bar


class Printer(Protocol):
    """Draws events one by one."""

    def show(self, event: Event) -> None:
        """Draw one."""
        ...

    def close(self) -> None:
        """Leave the screen tidy, also after an error."""
        ...


class QuietPrinter:
    """Nothing."""

    def show(self, event: Event) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class JsonPrinter(QuietPrinter):
    """One JSON object a line."""

    def __init__(self, out: Rich) -> None:
        self.out = out

    def show(self, event: Event) -> None:
        """Print it and flush: a reader waits for it."""
        self.out.print(json.dumps(to_json(event)), soft_wrap=True)
        self.out.file.flush()


class LinePrinter(QuietPrinter):
    """Plain lines: a stage's start and end, its notices, and now and then how far it is."""

    def __init__(self, err: Rich) -> None:
        self.err = err
        self.clock = _Clock()
        self.total = ""
        self.next_line = 0.0

    def show(self, event: Event) -> None:
        """Print a line, or leave it out."""
        self.clock.see(event)
        if isinstance(event, Started):
            self.total = f"/{event.total} {event.unit}" if event.total else f" {event.unit}"
            self.next_line = time.monotonic() + SECONDS_BETWEEN_LINES
            count = f" ({counted(event.total, event.unit[:-1])})" if event.total else ""
            self.line(f"{event.stage}: {event.title}{count}")
        elif isinstance(event, Notice) and self.clock.news(event):
            self.line(f"{event.stage}: note: {event.text}")
        elif isinstance(event, Finished):
            self.line(
                f"{Path(event.folder).name}: {self.clock.took(event)}  {figures(event.summary)}"
            )
        elif isinstance(event, events.Progress) and time.monotonic() >= self.next_line:
            self.next_line = time.monotonic() + SECONDS_BETWEEN_LINES
            self.line(f"{event.stage}: {event.done}{self.total}  {figures(event.values)}")

    def line(self, text: str) -> None:
        """One line, never wrapped."""
        self.err.print(text.rstrip(), soft_wrap=True)


class TerminalPrinter:
    """A bar for the running stage, a tick line for each finished one."""

    def __init__(self, err: Rich) -> None:
        self.err = err
        self.clock = _Clock()
        self.bar: Progress | None = None
        self.taken = 0  # columns of title, bar and count
        self.tick, self.dot = ("✓", "·") if _unicode(err) else ("+", "-")

    def show(self, event: Event) -> None:
        """Move the bar, or print above it."""
        self.clock.see(event)
        if isinstance(event, Started):
            self.start(event)
        elif isinstance(event, events.Progress) and self.bar:
            task = self.bar.task_ids[0]
            self.bar.update(task, completed=event.done, figures=self.beside(event))
        elif isinstance(event, Notice) and self.clock.news(event):
            text = Text(f"{self.dot} {event.text}", style="dim")
            self.err.print(Padding(text, (0, 0, 0, INDENT)))
        elif isinstance(event, Finished):
            self.close()
            self.err.print(self.tick_line(event), soft_wrap=True)

    def start(self, event: Started) -> None:
        """Show a bar."""
        self.close()
        self.bar = _progress(self.err, event.total is not None)
        self.bar.add_task(event.title, total=event.total, figures="")
        self.taken = len(event.title) + 2 * len(str(event.total or "")) + BAR + 6
        self.bar.start()

    def beside(self, event: events.Progress) -> str:
        """Figures and time to go, as much as leaves the bar its room."""
        left = self.clock.left(event.done)
        eta = f"  {duration_text(left)} left" if left is not None else ""
        room = self.err.width - self.taken - len(eta)
        return figures(event.values, room) + eta

    def tick_line(self, event: Finished) -> Text:
        """`✓ train   1m 20s  loss 0.41  ...`"""
        name = Path(event.folder).name
        took = "" if event.skipped else duration_text(self.clock.elapsed())
        line = Text.assemble((f"  {self.tick} ", "green"), f"{name:{NAME}} {took:>7}  ")
        shown = figures(event.summary, max(20, self.err.width - len(line) - 13 * event.skipped))
        return line.append(f"{shown}  done before" if event.skipped else shown)

    def close(self) -> None:
        """Take the bar away."""
        if self.bar:
            self.bar.stop()
            self.bar = None


def figures(values: dict[str, Any], room: int = 200) -> str:
    """The telling figures of a stage, as many as there is room for."""
    line = ""
    for key, name in SHOWN.items():
        value = values.get(key)
        if isinstance(value, (int, float)):
            text = f"{name} {figure_text(key, value)}".strip()
            if len(line) + len(text) + 2 > room:
                break
            line += ("  " if line else "") + text
    return line


class _Clock:
    """When the running stage began, how far it is, and what was said already."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.total: int | None = None
        self.first: tuple[float, int] | None = None  # when the first progress came, and how far
        self.said: set[str] = set()

    def see(self, event: Event) -> None:
        if isinstance(event, Started):
            self.started, self.total, self.first = time.monotonic(), event.total, None
        elif isinstance(event, events.Progress) and self.first is None:
            self.first = (time.monotonic(), event.done)

    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def left(self, done: int) -> float | None:
        """Seconds to go at the pace since the first progress: loading and resuming do not count."""
        if self.first is None or self.total is None or done <= self.first[1]:
            return None
        pace = (time.monotonic() - self.first[0]) / (done - self.first[1])
        return pace * (self.total - done)

    def news(self, notice: Notice) -> bool:
        """Whether a notice is said for the first time: every evaluation reads the same rows."""
        known = notice.text in self.said
        self.said.add(notice.text)
        return not known

    def took(self, event: Finished) -> str:
        """How long a stage took, in words."""
        return "done before" if event.skipped else f"done in {duration_text(self.elapsed())}"


def _progress(err: Rich, bounded: bool) -> Progress:
    count = MofNCompleteColumn() if bounded else TextColumn("{task.completed}", markup=False)
    return Progress(
        SpinnerColumn("dots" if _unicode(err) else "line"),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        count,
        TextColumn("{task.fields[figures]}", markup=False),
        console=err,
        transient=True,
        expand=True,
    )


def _unicode(err: Rich) -> bool:
    return (err.encoding or "").lower().startswith("utf")
