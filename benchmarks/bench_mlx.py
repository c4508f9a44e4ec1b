"""The MLX engine beside mlx-lm on a CPU: training, decoding and resuming, on the same samples.

Question -> SQL rows and the built-in small model in float32, both with OpenBLAS. Each side has its
own process with one thread, so CPU-seconds compare. Only real tokens count, each as often as it
stands in the data. transformers, which both sides import, imports PyTorch where it is installed:
memory is measured with it, and on both sides without.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import bench_train
import common
from mlx_sides import HALF, SIDES, STEPS, WARM

TURNS = 3  # of either side, one after the other


def main() -> None:
    """Run every side in its own process, then print the rows."""
    common.PACKAGES = (*common.PACKAGES, "mlx", "mlx-lm")
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--only", choices=ROWS, help="measure one thing alone")
    parser.add_argument("--side", choices=SIDES, help="run one side alone, in this process")
    parser.add_argument("--without-torch", action="store_true", help="as if it were not installed")
    parser.add_argument("--model", type=Path, help="model folder; the built-in one by default")
    options = parser.parse_args()
    if options.without_torch:
        sys.modules["torch"] = None  # ty: ignore[invalid-assignment]
    if options.side:
        print(json.dumps(SIDES[options.side](options.model)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or bench_train.fetch(Path(scratch))
        wanted = [options.only] if options.only else list(ROWS)
        rows = [row for name in wanted for row in ROWS[name](folder)]
    common.report(rows, options.save)


def training_rows(folder: Path) -> list[common.Row]:
    """Tokens per CPU-second and peak memory of LoRA training, samples in the file's order."""
    turns = [both("train", folder) for _ in range(TURNS - 1)]
    bare = both("train", folder, without_torch=True)
    return [
        speed_row("mlx-cpu-sql", [*turns, bare]),
        memory_row("mlx-cpu-sql-memory", *turns[0]),
        memory_row("mlx-cpu-sql-memory-without-torch", *bare),
    ]


def shuffled_rows(folder: Path) -> list[common.Row]:
    """The same where hardly two samples of an update begin alike."""
    turns = [both("shuffled", folder) for _ in range(TURNS)]
    return [speed_row("mlx-cpu-sql-shuffled", turns)]


def speed_row(name: str, turns: list[list[dict[str, Any]]]) -> common.Row:
    """Real tokens per CPU-second: either side's best turn, which the other core disturbed least."""
    speeds = [[side["tokens"] / side["cpu_s"] for side in turn] for turn in turns]
    ours, theirs = zip(*speeds, strict=True)
    return common.Row(
        name=name,
        value=round(max(ours), 1),
        unit="real tokens per CPU-second",
        better="higher",
        peers={"mlx-lm": round(max(theirs), 1)},
        notes={
            "samples a step": bench_train.ROWS,
            "steps": STEPS - WARM,
            "ratios of the turns": [round(a / b, 2) for a, b in speeds],
        },
    )


def memory_row(name: str, ours: dict[str, Any], theirs: dict[str, Any]) -> common.Row:
    """Peak resident sets."""
    return common.Row(
        name=name,
        value=round(ours["peak"] / 2**20),
        unit="MiB, peak resident set of the process",
        better="lower",
        peers={"mlx-lm": round(theirs["peak"] / 2**20)},
    )


def decoding_rows(folder: Path) -> list[common.Row]:
    """Greedy decoding of one answer from a 4-bit model."""
    with tempfile.TemporaryDirectory() as scratch:
        small = Path(scratch) / "small"
        subprocess.run(
            [sys.executable, __file__, "--side", "convert", "--model", str(folder)],
            env={**os.environ, "CONVERTED": str(small)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        ours, theirs = both("decode", small)
    assert ours["ids"] == theirs["ids"], "the answers differ"
    return [
        common.Row(
            name="mlx-decode-4bit",
            value=round(ours["tokens"] / ours["cpu_s"], 1),
            unit="tokens per CPU-second",
            better="higher",
            peers={"mlx-lm": round(theirs["tokens"] / theirs["cpu_s"], 1)},
            notes={"tokens": ours["tokens"], "group size": 64},
        )
    ]


def resuming_rows(folder: Path) -> list[common.Row]:
    """The largest difference of a loss between a resumed training and one that went through."""
    ours, theirs = both("resume", folder)
    return [
        common.Row(
            name="mlx-resume-difference",
            value=ours["difference"],
            unit=f"nats, largest of the {HALF} losses after resuming at {HALF} of {2 * HALF}",
            better="lower",
            peers={"mlx-lm": theirs["difference"]},
        )
    ]


def both(what: str, folder: Path, without_torch: bool = False) -> list[dict[str, Any]]:
    """The figures of pippin's and of mlx-lm's side."""
    names = f"{what}-pippin", f"{what}-mlx-lm"
    return [in_own_process(name, folder, without_torch) for name in names]


def in_own_process(side: str, folder: Path, without_torch: bool) -> dict[str, Any]:
    """One side with one thread; its figures are the last line it prints."""
    command = [sys.executable, __file__, "--side", side, "--model", str(folder)]
    command += ["--without-torch"] if without_torch else []
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


ROWS = {
    "train": training_rows,
    "shuffled": shuffled_rows,
    "decode": decoding_rows,
    "resume": resuming_rows,
}

if __name__ == "__main__":
    main()
