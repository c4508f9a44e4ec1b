"""The only printer: results to stdout; progress and errors to stderr, as fits terminal or pipe."""

import io
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

from rich.console import Console as Rich

from pippin.check import Finding
from pippin.check.audits import Audited
from pippin.check.runner import Begun
from pippin.console import check_tables, tables
from pippin.console.printers import JsonPrinter, LinePrinter, Printer, QuietPrinter, TerminalPrinter
from pippin.data import show
from pippin.data.show import Look
from pippin.events import Event, Notice, Progress, Started
from pippin.plan import Plan

COLUMNS = 80  # what tables need


def make_rich(file: TextIO, least: int = 0) -> Rich:
    """A rich console that prints text as it is; colour and width follow terminal and NO_COLOR.

    Where the terminal has fewer than `least` columns it wraps long lines itself: no figure is cut.
    """
    if isinstance(file, io.TextIOWrapper):
        file.reconfigure(errors="replace")  # a terminal without a letter still shows the rest
    rich = Rich(file=file, markup=False, highlight=False, emoji=False)
    if rich.width < least:
        rich.width = least
    return rich


@dataclass(kw_only=True)
class Console:
    """Prints one command's work. `mode`: auto (terminal or lines, as stderr is), json, quiet."""

    mode: str = "auto"
    out: Rich = field(default_factory=lambda: make_rich(sys.stdout, COLUMNS))
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

    def header(self, plan: Plan) -> None:
        """The first line of a run."""
        if self.mode == "auto":
            self.err.print(tables.header(plan), soft_wrap=True)
        for text in plan.notices:
            self.notice(Notice(stage="check", text=text))

    def notice(self, notice: Notice) -> None:
        """Something worth knowing, beside the results."""
        printer = self.printer()
        printer.show(notice)
        printer.close()

    def text(self, text: str, end: str = "\n") -> None:
        """A result to stdout, exactly as it is, at once."""
        self.out.print(text, end=end, soft_wrap=True)
        self.out.file.flush()

    @property
    def asks(self) -> bool:
        """Whether somebody sits at the keyboard."""
        return sys.stdin.isatty()

    def questions(self) -> Iterator[str]:
        """Lines from the keyboard, after a prompt on stderr, or from a pipe.

        Bytes that are no text come as the sign for a character that is not known.
        """
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")
        while True:
            if self.asks:
                self.err.print("> ", end="", style="bold")
            line = sys.stdin.readline()
            if not line or line.strip() in ("/exit", "/quit"):
                return
            if line.strip():
                yield line.strip()

    def json(self, value: dict[str, Any]) -> None:
        """One JSON object on a line of stdout."""
        self.text(json.dumps(value))

    def results(self, rows: list[dict[str, str]], prompts: list[Any], report: str) -> None:
        """The end of a run: stages side by side, what they answered, where the report is."""
        if self.mode == "json":
            answered = [{"prompt": p, "answers": by_stage} for p, by_stage in prompts]
            self.json({"event": "results", "rows": rows, "prompts": answered, "report": report})
            return
        if rows:
            self.out.print(tables.summary(rows))
        if prompts:
            self.out.print(tables.answers(prompts))
        self.text(f"report: {report}")

    def partition(self, rows: list[dict[str, str]], line: str) -> None:
        """What a delegate took of a program; `rows` and `line` as the report has them."""
        if self.mode == "json":
            self.json({"event": "partition", "rows": rows, "line": line})
            return
        self.out.print(tables.partition(rows, line))

    def comparison(self, rows: list[dict[str, Any]]) -> None:
        """Ways to quantize side by side; `rows` as compare.comparison gives them."""
        if self.mode == "json":
            self.json({"event": "comparison", "rows": rows})
            return
        self.out.print(tables.comparison(rows))

    def look(self, seen: Look) -> None:
        """The data as the model sees it."""
        if self.mode == "json":
            self.json({"event": "data", **show.as_json(seen)})
        elif self.out.is_terminal:
            self.out.print(show.as_rich(seen))
        else:
            for line in show.as_lines(seen):
                self.text(line)

    def plan(self, plan: Plan, done: set[str]) -> None:
        """What a run will do, need and refuse."""
        if self.mode == "json":
            self.json(plan_json(plan, done))
            return
        facts = list(tables.plan_facts(plan))
        for name, value in facts:
            self.text(f"{name:9} {value}")
        self.out.print(tables.plan_steps(plan, done))
        if plan.ways and (plan.machine.elsewhere or plan.refusals):
            self.out.print(tables.plan_ways(plan))

    def probes(self, found: Iterator[Begun | Finding]) -> list[Finding]:
        """Draw a device's probes as they come, then their table; the findings."""
        printer, findings, where = self.printer(), [], ""
        try:
            for each in found:
                if isinstance(each, Begun):
                    where = each.where
                    title = f"probing {where}"
                    printer.show(
                        Started(stage="check", title=title, total=each.count, unit="probes")
                    )
                else:
                    findings.append(each)
                    printer.show(Progress(stage="check", done=len(findings), values={}))
                    if self.mode == "json":
                        self.json({"event": "probe", **each.as_json()})
        finally:
            printer.close()
        self._findings(findings, where)
        return findings

    def audits(self, found: Iterator[Audited]) -> list[Audited]:
        """Draw programs under another device's rules as they come, then their table."""
        printer, done = self.printer(), []
        try:
            printer.show(Started(stage="check", title="judging operators", unit="programs"))
            for each in found:
                done.append(each)
                printer.show(Progress(stage="check", done=len(done), values={}))
                if self.mode == "json":
                    self.json({"event": "audit", **each.as_json()})
        finally:
            printer.close()
        if self.mode != "json":
            self.out.print(check_tables.audits_table(done))
            for text in check_tables.troubles(done):
                self.out.print(text, soft_wrap=True)
        return done

    def fuji(self, run: dict[str, Any]) -> None:
        """What a Fuji-shaped model did on a device beside the CPU."""
        if self.mode == "json":
            self.json({"event": "fuji", **run})
            return
        self.out.print(check_tables.fuji_table(run))

    def _findings(self, findings: list[Finding], where: str) -> None:
        line = check_tables.count_line(findings, where)
        if self.mode == "json":
            self.json({"event": "results", "where": where, "text": line})
            return
        self.out.print(check_tables.findings_table(findings))
        for text in check_tables.failures(findings):
            self.out.print(text, soft_wrap=True)
        self.text(line)


def plan_json(plan: Plan, done: set[str]) -> dict[str, Any]:
    """The plan as a JSON object."""
    needs = {
        name: {"memory": n.memory, "disk": n.disk, "seconds": n.seconds}
        for name, n in plan.needs.items()
    }
    return {
        "event": "plan",
        "facts": dict(tables.plan_facts(plan)),
        "steps": [
            {"name": s.name, "stage": s.stage, "done": s.name in done, "need": needs.get(s.name)}
            for s in plan.steps
        ],
        "ways": [asdict(way) for way in plan.ways],
        "refusals": [{"error": message, "hint": hint} for message, hint in plan.refusals],
    }
