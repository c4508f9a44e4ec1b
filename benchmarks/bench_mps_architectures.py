"""mps-audit-architectures: the most used architectures under MPS's rules; writes their page."""

import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from common import ROOT, Row, arguments, report
from pippin.check.audits import Ask, Audited
from pippin.engines.torch import mps

PAGE = Path("docs") / "mps-architectures.md"
CHIP = "m4"  # without the faults that other chips have alone
PROGRAMS = ("float32", "bfloat16", "training", "generation")


def main() -> None:
    """Audit all, print the row, write the page."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--torch", help="rules of another version, e.g. 2.14; writes no page")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    start = time.perf_counter()
    audited = list(mps.architectures(Ask(version=asked.torch, chip=CHIP)))
    seconds = round(time.perf_counter() - start)
    subjects = dict.fromkeys(each.subject for each in audited)
    bad = dict.fromkeys(e.subject for e in audited if e.outcome in ("fails", "error"))
    notes = {"seconds": seconds, "programs": len(audited), "not_fine": list(bad)}
    notes["rules"] = asked.torch or torch.__version__
    row = Row(
        name="mps-audit-architectures",
        value=len(subjects),
        unit="architectures",
        better="higher",
        notes=notes,
    )
    report([row], asked.save)
    if asked.torch is None:
        (ROOT / PAGE).write_text(page(audited))


def page(audited: Sequence[Audited]) -> str:
    """The table, then what is wrong and the way round."""
    found = {(each.subject, each.program): each for each in audited}
    subjects = list(dict.fromkeys(each.subject for each in audited))
    lines = [
        "# Architectures under MPS's rules",
        "",
        "<!-- Written by benchmarks/bench_mps_architectures.py. -->",
        "",
        f"{len(subjects)} architectures as tiny random models, operators judged by the rules of",
        f"PyTorch {torch.__version__.partition('+')[0]} for Apple's GPUs (transformers "
        f"{transformers.__version__}). `pippin check --top50` makes this",
        "table for the versions you have. It tells that operators and dtypes exist on the GPU, not",
        "that their numbers are right: that is what `pippin check` on the Mac itself is for.",
        "Faults that an M1, M2 or M5 has alone are left out; `pippin check MODEL --as mps` tells",
        "them.",
        "",
        f"| architecture | {' | '.join(PROGRAMS)} |",
        f"|---|{'---|' * len(PROGRAMS)}",
    ]
    for subject in subjects:
        cells = [_cell(found.get((subject, program))) for program in PROGRAMS]
        lines.append(f"| {subject} | {' | '.join(cells)} |")
    lines += ["", "## What does not run, or is known to be wrong", "", *_troubles(audited)]
    return "\n".join(lines) + "\n"


def _cell(each: Audited | None) -> str:
    return "" if each is None else each.outcome


def _troubles(audited: Sequence[Audited]) -> list[str]:
    """Each kind of trouble once, with the models that have it."""
    met: dict[str, list[str]] = {}
    for each in audited:
        for trouble in (*each.fails, *each.known_wrong):
            text = f"{trouble.kind}, `{trouble.operator}`: {trouble.why}. {trouble.remedy}."
            met.setdefault(text, []).append(f"{each.subject} ({each.program})")
        if each.error and not each.fails:
            met.setdefault(f"the CPU's own error: {each.error}", []).append(each.subject)
    return [f"- {text} In {', '.join(models)}." for text, models in met.items()] or ["Nothing."]


if __name__ == "__main__":
    main()
