"""What `pippin check` prints: one row a probe with its error by dtype, then what failed and why."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from pippin.check import Finding
from pippin.check.audits import Audited, Trouble
from pippin.figures import counted

DTYPES = ("float32", "float16", "bfloat16")
VERDICTS = ("pass", "inaccurate", "wrong", "not there")  # better ones first
OUTCOMES = {"fine": "green", "known wrong": "yellow", "fails": "bold red", "error": "bold red"}
STYLE = {"pass": "green", "inaccurate": "yellow", "wrong": "bold red", "not there": "dim"}


def findings_table(findings: Sequence[Finding]) -> Table:
    """Errors side by side by dtype; those without a dtype under `error`."""
    table = _table()
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
    return f"{counted(len(findings), 'probe')} on {where}: {text}"


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
    allowed = f"up to {found.tolerance:.2g} is rounding" if found.tolerance else "none is allowed"
    return f"error {found.figure:.2g}, {allowed}, at {found.detail}"


def audits_table(audited: Sequence[Audited]) -> Table:
    """Subjects down, programs across."""
    programs = list(dict.fromkeys(each.program for each in audited))
    found = {(each.subject, each.program): each.outcome for each in audited}
    table = _table()
    for heading in ("model", *programs):
        table.add_column(heading, no_wrap=True)
    for subject in dict.fromkeys(each.subject for each in audited):
        outcomes = [found.get((subject, program)) for program in programs]
        cells = [Text(o, style=OUTCOMES[o]) if o else Text("-", style="dim") for o in outcomes]
        table.add_row(Text(subject), *cells)
    return table


def troubles(audited: Sequence[Audited]) -> Iterator[Text]:
    """Each kind of trouble once, with the programs that have it, the place and the way round."""
    by_reason: dict[tuple[str, str, str], list[tuple[Audited, Trouble]]] = {}
    for each in audited:
        if each.error:
            yield Text(f"error: {each.subject}, {each.program}: {each.error}", style="bold red")
        for trouble in (*each.fails, *each.known_wrong):
            key = (trouble.kind, trouble.operator, trouble.why)
            by_reason.setdefault(key, []).append((each, trouble))
    for (kind, operator, why), met in by_reason.items():
        where = ", ".join(dict.fromkeys(f"{each.subject} {each.program}" for each, _ in met[:4]))
        more = f" and {len(met) - 4} more" if len(met) > 4 else ""
        style = OUTCOMES["known wrong" if kind == "known wrong" else "fails"]
        yield Text(f"{kind}: ", style=style).append(f"{operator}: {why}", style="not bold default")
        yield Text(f"  first at {met[0][1].where}; in {where}{more}")
        if met[0][1].remedy:
            yield Text(f"  {met[0][1].remedy}")


def fuji_table(run: Mapping[str, Any]) -> Table:
    """What a Fuji-shaped model did on a device beside the CPU; `run` has FujiRun's fields."""
    rows = {
        "model": f"Fuji {run['size']}, {run['parameters'] / 1e9:.2f} billion weights",
        "device": f"{run['device']}, {run['dtype']}",
        "tokens": " ".join(map(str, run["tokens"])),
        "same tokens on the CPU": f"{run['tokens_equal']:.1%}",
        "same tokens without a cache": f"{run['loop_equal']:.1%}",
        "logits, largest difference": f"{run['difference']:.3g}, of float32 arithmetic on the CPU",
        "logits, mean difference": f"{run['mean_difference']:.3g}",
        "logits, spread": f"{run['spread']:.3g}",
        "likeliest token agrees": f"{run['agreement']:.1%}",
        "seconds": f"{run['device_seconds']:.1f} there, {run['cpu_seconds']:.1f} on the CPU",
        "peak memory": f"{run['peak_memory'] / 1e9:.1f} GB",
    }
    table = _table()
    for heading in ("what", "found"):
        table.add_column(heading)
    for name, text in rows.items():
        table.add_row(Text(name), Text(text))
    return table


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
