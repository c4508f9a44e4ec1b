"""The only printer: results to stdout; progress and errors to stderr, as fits terminal or pipe."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

from rich.console import Console as Rich

from pippin.events import Event
from pippin.plan import Plan
from pippin.printers import JsonPrinter, LinePrinter, Printer, QuietPrinter, TerminalPrinter


def make_rich(file: TextIO) -> Rich:
    """A rich console that prints text as it is; colour and width follow terminal and NO_COLOR."""
    return Rich(file=file, markup=False, highlight=False, soft_wrap=True, emoji=False)


@dataclass(kw_only=True)
class Console:
    """Prints one command's work. `mode`: auto (terminal or lines, as stderr is), json, quiet."""

    mode: str = "auto"
    out: Rich = field(default_factory=lambda: make_rich(sys.stdout))
    err: Rich = field(default_factory=lambda: make_rich(sys.stderr))

    def printer(self) -> Printer:
        """How events are drawn here."""
        if self.mode == "json":
            return JsonPrinter(self.out)
        if self.mode == "quiet":
            return QuietPrinter()
        return TerminalPrinter(self.err) if self.err.is_terminal else LinePrinter(self.err)

    def events(self, events: Iterator[Event]) -> None:
        """Draw a run to its end.

        A Ctrl-C that arrives while we draw is handed to the stage, which saves its work first.
        """
        printer = self.printer()
        try:
            for event in events:
                printer.show(event)
        except KeyboardInterrupt as stop:
            throw = getattr(events, "throw", None)
            if throw is None:
                raise
            throw(stop)
            raise
        finally:
            printer.close()

    def text(self, text: str, end: str = "\n") -> None:
        """A result to stdout, exactly as it is."""
        self.out.print(text, end=end, soft_wrap=True)

    def json(self, value: dict[str, Any]) -> None:
        """One JSON object on a line of stdout."""
        self.out.print(json.dumps(value), soft_wrap=True)

    def plan(self, plan: Plan) -> None:
        """A plan as lines to stdout."""
        self.text(f"{plan.recipe.name}: {plan.recipe.model.source} on {plan.device}")
        for step in plan.steps:
            self.text(f"  {step.name:30} {step.title}")
