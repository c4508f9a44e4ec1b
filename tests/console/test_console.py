"""What is printed where: terminal, pipe, JSON; text from elsewhere is left as it is."""

import io
import json
import time

import pytest
from rich.console import Console as Rich
from tests.tiny_runs import MACHINE, make_recipe

from pippin import figures
from pippin.console import COLUMNS, Console, make_rich, printers, tables
from pippin.console.printers import LinePrinter, TerminalPrinter
from pippin.events import Finished, Metric, Notice, Progress, Started
from pippin.plan import make_plan
from pippin.report.table import NONE

EVENTS = [
    Started(stage="train", title="train a rank 16 adapter", total=100, unit="updates"),
    Notice(stage="train", text="needs [mlx] :smile: and [bold]more[/bold]"),
    Metric(stage="train", step=40, values={"loss": 0.4}),
    Progress(stage="train", done=40, values={"loss": 0.4123, "tokens_per_second": 523.0}),
    Finished(stage="train", folder="runs/sql/train", summary={"valid_loss": 0.3, "note": "x"}),
    Finished(stage="merge", folder="runs/sql/merge", summary={}, skipped=True),
]
ROW = {
    "rows": "1000",
    "loss": "0.412",
    "perplexity": "1.51",
    "kl": "0.0001",
    "top1": "99.8 %",
    "exact_match": "46 %",
    "gain_kept": "100.0 %",
    "size_bytes": "269 MB",
    "bits_per_weight": "16.00",
    "gates": "passed",
}
ROWS = [
    {"stage": s, **ROW} for s in ("base", "adapter", "merged", "quantized", "deployed-executorch")
]


def fake(width=80, terminal=False, encoding="utf-8"):
    """A rich console over a text file, and that file's content as a function."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    rich = Rich(
        file=file,
        width=width,
        force_terminal=terminal,
        markup=False,
        highlight=False,
        emoji=False,
        color_system=None,
    )
    return rich, lambda: raw.getvalue().decode(encoding)


def test_lines_in_a_pipe():
    rich, text = fake(width=20)
    printer = LinePrinter(rich)
    for event in EVENTS:
        printer.show(event)
    started, notice, ended, skipped = text().splitlines()
    assert started == "train: train a rank 16 adapter (100 updates)"
    assert notice == "train: note: needs [mlx] :smile: and [bold]more[/bold]"
    assert ended.startswith("train: done in ")
    assert ended.endswith("valid loss 0.3000")
    assert skipped == "merge: done before"


def test_lines_are_sparse(monkeypatch):
    rich, text = fake()
    printer = LinePrinter(rich)
    printer.show(EVENTS[0])
    for done in range(50):
        printer.show(Progress(stage="train", done=done, values={}))
    assert len(text().splitlines()) == 1
    printer.next_line = 0.0
    printer.show(EVENTS[3])
    assert text().splitlines()[-1] == "train: 40/100 updates  loss 0.4123  523 tok/s"


def test_a_notice_is_said_once():
    rich, text = fake()
    printer = LinePrinter(rich)
    for event in EVENTS[:2] * 3:
        printer.show(event)
    assert text().count("needs [mlx]") == 1


def test_time_left_counts_from_the_first_progress(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(printers.time, "monotonic", lambda: now[0])
    rich, _ = fake(terminal=True)
    printer = TerminalPrinter(rich)
    printer.clock.see(EVENTS[0])
    now[0] += 60  # the model loads
    printer.clock.see(Progress(stage="train", done=50, values={}))  # resumed at half
    assert printer.clock.left(50) is None
    now[0] += 10
    assert printer.clock.left(60) == pytest.approx(40.0)


def test_bar_has_room_at_80_columns():
    rich, text = fake(80, terminal=True)
    printer = TerminalPrinter(rich)
    printer.show(Started(stage="train", title="train a rank 16 adapter", total=12_000))
    printer.show(Progress(stage="train", done=0, values={}))
    time.sleep(0.01)
    values = {"loss": 0.4123, "tokens_per_second": 12_345.0, "memory_bytes": 2.1e9}
    printer.show(Progress(stage="train", done=9_999, values=values))
    printer.bar.refresh()
    printer.close()
    assert "9999/12000" in text().replace(" ", "")
    assert "loss 0.4123" in text()
    assert "…" not in text()


@pytest.mark.parametrize("width", [40, 80, 120])
def test_terminal_lines_fit(width):
    rich, text = fake(width, terminal=True)
    printer = TerminalPrinter(rich)
    summary = {"loss": 1.0, "kl": 0.1, "top1": 0.9, "exact_match": 0.5, "gain_kept": 0.99}
    line = printer.tick_line(Finished(stage="evaluate", folder="o/evaluate-base", summary=summary))
    assert len(line.plain) <= max(width, 62)
    for event in EVENTS:
        printer.show(event)
    printer.close()
    assert "needs [mlx] :smile:" in text()
    assert "✓" in text()


def test_terminal_without_unicode():
    rich, text = fake(80, terminal=True, encoding="ascii")
    printer = TerminalPrinter(rich)
    for event in EVENTS:
        printer.show(event)
    printer.close()
    assert text().isascii()


def test_json_has_every_event_and_nothing_else():
    rich, text = fake(width=20)
    console = Console(mode="json", out=rich, err=fake()[0])
    console.events(iter(EVENTS))
    console.results(ROWS, [("p", {"base": "a"})], "out/report.html")
    objects = [json.loads(line) for line in text().splitlines()]
    kinds = [o["event"] for o in objects]
    assert kinds == ["started", "notice", "metric", "progress", "finished", "finished", "results"]
    assert objects[1]["text"] == EVENTS[1].text
    assert objects[-1]["rows"] == ROWS


def test_quiet_prints_results_only():
    (out, out_text), (err, err_text) = fake(), fake()
    console = Console(mode="quiet", out=out, err=err)
    console.events(iter(EVENTS))
    console.results(ROWS, [], "out/report.html")
    assert err_text() == ""
    assert "report: out/report.html" in out_text()


@pytest.mark.parametrize("width", [80, 120])
def test_summary_fits_and_shows_every_figure(width):
    rich, text = fake(width)
    rich.print(tables.summary(ROWS))
    lines = text().splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in text()
    (line,) = (line for line in lines if line.strip().startswith("deployed"))
    for key in ("rows", "loss", "kl", "top1", "exact_match", "gain_kept", "size_bytes", "gates"):
        assert ROW[key] in line


def test_a_narrow_terminal_cuts_no_figure(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    out = io.StringIO()
    Console(out=make_rich(out, COLUMNS)).results(ROWS, [], "report.html")
    assert ROW["size_bytes"] in out.getvalue()
    assert "…" not in out.getvalue()


def test_operators_left_outside_are_named_with_their_reason():
    def row(operator, delegated, left, share, why=""):
        return {
            "operator": operator,
            "delegated": delegated,
            "left": left,
            "share": share,
            "why": why,
        }

    rows = [
        row("aten.linear", "301", "0", "95.2%"),
        row("aten.mul.Tensor", "271", "0", NONE),
        row("quantized_decomposed.embedding_byte", "0", "1", NONE, "no such operator in XNNPACK"),
    ]
    rich, text = fake(80)
    rich.print(tables.partition(rows, "xnnpack computes 97.1% of the arithmetic"))
    assert "…" not in text()
    assert "95.2%" in text()
    assert "no such operator" in text()
    assert "aten.mul" not in text()
    assert "271 more nodes inside multiply" in text()


def test_several_targets_go_by_their_names():
    assert tables.short_names(["base", "deployed-a"]) == {"deployed-a": "deployed"}
    both = tables.short_names(["deployed-a", "deployed-b"])
    assert both == {"deployed-a": "a", "deployed-b": "b"}


def test_answers_are_not_read_as_markup():
    rich, text = fake(60)
    rich.print(
        tables.answers([("say [red]x[/red]", {"base": "[link=x]\nno :smile:", "tuned": ""})])
    )
    assert "say [red]x[/red]" in text()
    assert "[link=x] no :smile:" in text()
    assert "(nothing)" in text()


def test_plan_as_text_and_json(tmp_path):
    plan = make_plan(make_recipe(tmp_path), MACHINE)
    rich, text = fake()
    Console(out=rich, err=fake()[0]).plan(plan, {"train"})
    assert "Test Chip, 2 cores, 8.00 GB of 16.00 GB free" in text()
    assert "64 tokens (64 tokens x 1 row x 1 accumulated)" in text()
    assert any("train" in line and "done before" in line for line in text().splitlines())
    rich, text = fake()
    Console(mode="json", out=rich, err=fake()[0]).plan(plan, set())
    (only,) = text().splitlines()
    found = json.loads(only)
    assert [s["name"] for s in found["steps"]] == [s.name for s in plan.steps]
    assert found["steps"][1]["need"]["memory"] == plan.needs["train"].memory


def test_ctrl_c_while_drawing_is_handed_to_the_stage():
    saved = []

    def stage():
        try:
            yield EVENTS[0]
            yield EVENTS[1]
        except KeyboardInterrupt:
            saved.append("checkpoint")
            raise

    console = Console(mode="quiet", out=fake()[0], err=fake()[0])
    console.printer = Interrupting  # the user strikes while an event is drawn
    with pytest.raises(KeyboardInterrupt):
        console.events(stage())
    assert saved == ["checkpoint"]


class Interrupting:
    """A printer during which Ctrl-C comes."""

    def show(self, event):
        """Strike."""
        raise KeyboardInterrupt

    def close(self):
        """Nothing."""


def test_no_color_is_respected(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert make_rich(io.StringIO()).no_color


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (1234, "1,234 rows")]
)
def test_counts(count, text):
    assert figures.counted(count, "row") == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "2 kB"), (268_900_000, "269 MB"), (2.1e9, "2.10 GB")],
)
def test_bytes(value, text):
    assert figures.bytes_text(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0s"), (9.94, "9.9s"), (59.4, "59s"), (59.6, "1m 00s"), (3599.6, "1h 00m")],
)
def test_durations(seconds, text):
    assert figures.duration_text(seconds) == text


def test_figures():
    assert figures.count_text(134_515_008) == "134.5M"
    assert figures.share_text(0.9731) == "97.3%"
    assert figures.figure_text("loss", 0.41234) == "0.4123"
    assert figures.figure_text("learning_rate", 1e-5) == "1.00e-05"
    assert figures.figure_text("peak_memory_bytes", 2.1e9) == "2.10 GB"
    assert figures.duration_text(float("nan")) == "?"
