"""What `pippin check` prints: one row a probe with its error by dtype, then what failed and why."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from pippin.check import Finding

DTYPES = ("float32", "float16", "bfloat16")
VERDICTS = ("pass", "inaccurate", "wrong", "not there")  # better ones first
STYLE = {"pass": "green", "inaccurate": "yellow", "wrong": "bold red", "not there": "dim"}


def findings_table(findings: Sequence[Finding]) -> Table:
    """Errors side by side by dtype; those without a dtype under `error`."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("probe", no_wrap=True)
    for heading in ("error", *DTYPES):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for name, by_dtype in _rows(findings).items():
        cells = [_cell(by_dtype.get(dtype)) for dtype in ("", *DTYPES)]
        worst = max((found.verdict for found in by_dtype.values()), key=VERDICTS.index)
        if any(found.verdict == "wrong" for found in by_dtype.values()):
            worst = "wrong"
        table.add_row(Text(name), *cells, Text(worst, style=STYLE[worst]))
    return table


def failures(findings: Sequence[Finding]) -> Iterator[Text]:
    """Two lines for each finding that is no pass: what was seen, and the way round it."""
    for found in findings:
        if found.verdict == "pass":
            continue
        head = Text(f"{found.verdict}: ", style=STYLE[found.verdict])
        yield head.append(f"{found.probe}: {_seen(found)}", style="not bold")
        if found.remedy:
            yield Text(f"  {found.remedy}")


def count_line(findings: Sequence[Finding], where: str) -> str:
    """`112 probes on cpu (2 cores), PyTorch 2.13.0: 111 pass, 1 wrong`."""
    counts = {v: sum(found.verdict == v for found in findings) for v in VERDICTS}
    text = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return f"{len(findings)} probes on {where}: {text}"


def _rows(findings: Sequence[Finding]) -> dict[str, dict[str, Finding]]:
    rows: dict[str, dict[str, Finding]] = {}
    for found in findings:
        stem, _, last = found.probe.rpartition(".")
        name, dtype = (stem, last) if last in DTYPES and stem.count(".") else (found.probe, "")
        rows.setdefault(name, {})[dtype] = found
    return rows


def _cell(found: Finding | None) -> Text:
    if found is None:
        return Text("")
    if found.figure is None:
        return Text("-", style=STYLE[found.verdict])
    text = "exact" if found.figure == 0 else f"{found.figure:.1e}"
    return Text(text, style="" if found.verdict == "pass" else STYLE[found.verdict])


def _seen(found: Finding) -> str:
    if found.figure is None:
        return found.detail
    return f"error {found.figure:.2g}, up to {found.tolerance:.2g} is rounding, at {found.detail}"
