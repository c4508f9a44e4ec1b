"""The row that every benchmark prints, and appends to benchmarks/results/ with `--save`."""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "transformers", "peft", "jax", "numpy")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One figure. `peers` are the same figure of other programs, measured in the same run.

    `limit` is the best the machine could do, `share_of_limit` how near the figure comes to it.
    """

    name: str
    value: float
    unit: str
    better: Literal["higher", "lower"]
    limit: float | None = None
    share_of_limit: float | None = None
    peers: dict[str, float] = field(default_factory=dict)
    spread: float | None = None
    notes: dict[str, Any] = field(default_factory=dict)


def arguments(doc: str) -> argparse.ArgumentParser:
    """A parser with the option that every benchmark has."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results/")
    return parser


def report(rows: list[Row], save: bool, gpu: tuple[str, int] | None = None) -> None:
    """Print every row as a line of JSON; with `save`, append them to this machine's file.

    `gpu` is the name and the memory in GB of the device that did the work, where there is one.
    """
    where = {
        "machine": machine() if gpu is None else f"{gpu[0]}, {gpu[1]} GB; {machine()}",
        "versions": versions(),
        "commit": commit(),
        "command": " ".join(["python", *sys.argv]),
    }
    lines = [json.dumps({**asdict(row), **where}) for row in rows]
    print("\n".join(lines))
    if save:
        with results_file(*(gpu or (chip_name(), memory_gb()))).open("a") as file:
            file.writelines(line + "\n" for line in lines)


def results_file(chip: str, memory: int) -> Path:
    """benchmarks/results/<chip>-<gb>gb-<date>.jsonl."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    chip = "".join(c if c.isalnum() else "-" for c in chip.lower()).strip("-")
    return ROOT / "benchmarks" / "results" / f"{chip}-{memory}gb-{today}.jsonl"


def machine() -> str:
    """Chip, cores that may be used and memory, in words."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{chip_name()}, {cores} cores, {memory_gb()} GB"


def chip_name() -> str:
    """The processor's name."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return platform.machine()


def memory_gb() -> int:
    """Installed memory."""
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9)


def versions() -> dict[str, str]:
    """Python and the packages that matter, those that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit the figures belong to, marked where the working tree differs from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()
