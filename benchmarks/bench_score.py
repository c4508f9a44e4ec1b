"""The task itself after quantizing: exact answers of a tuned model, of its 4 bits, and after QAT.

The rows of recipes/data/sql are cut in folds by table. For each fold an adapter is trained on the
others' rows, so every row is answered by models that never saw its table. They answer the fold's
rows in bfloat16 weights, as 4-bit codes, and as the same codes with scales trained on ([qat]). The
original is the built-in small model moved off the grid it was distributed on. Differences are over
the same rows, with the standard error of their mean.

With `--work` what was made is kept, and `--fold` makes one fold's part: calls for several folds may
run beside each other once the first, with `--fold -1`, has made the original. Rows are printed of
what is there.
"""

import itertools
import json
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import common
from pippin import recipe
from pippin.model.quantized import bits_per_weight
from pippin.stages import evaluate as evaluation
from pippin.stages.evaluate import evaluate, read_scores
from pippin.stages.fetch import fetch
from pippin.stages.merge import merge
from pippin.stages.qat import qat
from pippin.stages.quantize import quantize
from pippin.stages.train import train
from quant_ruler import dither
from stage_runs import run_stage

DATA = common.ROOT / "recipes" / "data" / "sql"
BEST = recipe.Quantize(
    method="best",
    importance="inputs",
    bits=4,
    group_size=64,
    scheme="affine",
    embed_bits=8,
    embed_group_size=64,
    embed_scheme="affine",
)
WAYS = {"best": BEST, "rtn": replace(BEST, method="rtn")}
# What is scored of every fold: bfloat16 first, then each way without and with [qat].
LABELS = ("bf16", *(f"{way}{after}" for way in WAYS for after in ("", ", qat")))
FOLDS, VALID_ROWS = 3, 40


def main() -> None:
    """Make what is missing, print the row of what is there."""
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--work", type=Path, help="a folder that keeps what was made")
    parser.add_argument("--fold", type=int, help="this fold alone; -1: only the original")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--epochs", type=float, default=6.0, help="of each adapter")
    parser.add_argument("--qat", type=int, default=64, help="updates of the scales after it")
    parser.add_argument("--rows", type=int, default=10**6, help="held-out rows of a fold")
    options = parser.parse_args()
    vars(evaluation)["SAMPLES_KEPT"] = 10**6  # every row's answer is needed
    with tempfile.TemporaryDirectory() as scratch:
        desk = Desk(
            work=options.work or Path(scratch),
            device=options.device,
            epochs=options.epochs,
            qat=options.qat,
            rows=options.rows,
        )
        for fold in range(FOLDS) if options.fold is None else (options.fold,):
            for name, make in desk.things(fold):
                began = time.perf_counter()
                if not (desk.work / name).exists():
                    make()
                    print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
        if desk.answered("bf16"):
            common.report([desk.row()], options.save, graphics(options.device))


def graphics(device: str) -> tuple[str, int] | None:
    """Name and memory of the CUDA device, where that did the work."""
    if device != "cuda":
        return None
    import torch

    found = torch.cuda.get_device_properties(0)
    return found.name, round(found.total_memory / 1e9)


@dataclass(frozen=True, kw_only=True, slots=True)
class Desk:
    """Folders by name in `work`; what is there is not made again."""

    work: Path
    device: recipe.DeviceName
    epochs: float
    qat: int
    rows: int

    def things(self, fold: int) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Everything there is to make for a fold, in order, by its folder's name."""
        yield "original", self.make_original
        if fold < 0:
            return
        yield f"data-{fold}", partial(self.make_data, fold)
        adapter, merged = f"adapter-{fold}", f"merged-{fold}"
        yield adapter, partial(self.run, train, adapter, fold, model="original")
        both = {"model": "original", "adapter": adapter}
        yield merged, partial(self.run, merge, merged, fold, **both)
        yield f"bf16-{fold}", partial(self.run, evaluate, f"bf16-{fold}", fold, model=merged)
        for way in WAYS:
            small, tuned = f"small-{way}-{fold}", f"tuned-{way}-{fold}"
            yield small, partial(self.run, quantize, small, fold, WAYS[way], model=merged)
            yield tuned, partial(self.run, qat, tuned, fold, model=small)
            for label, model in ((way, small), (f"{way}, qat", tuned)):
                name = f"{label}-{fold}"
                yield name, partial(self.run, evaluate, name, fold, model=model)

    def make_original(self) -> None:
        """The small model off its grid."""
        self.run(fetch, "fetched", 0)
        dither(self.work / "fetched", self.work / "original")

    def make_data(self, fold: int) -> None:
        """The fold's rows are held out; some other tables validate, the rest train."""
        held_out, *others = (tables(n) for n in [fold, *(n for n in range(FOLDS) if n != fold)])
        rest = list(itertools.chain.from_iterable(itertools.chain.from_iterable(others)))
        folder = self.work / f"data-{fold}"
        folder.mkdir(parents=True)
        splits = {
            "test": list(itertools.chain.from_iterable(held_out))[: self.rows],
            "valid": rest[:VALID_ROWS],
            "train": rest[VALID_ROWS:],
        }
        # A table on both sides of the cut validates nothing.
        last = table(splits["valid"][-1])
        splits["train"] = [row for row in splits["train"] if table(row) != last]
        for split, rows in splits.items():
            (folder / f"{split}.jsonl").write_text("".join(rows))

    def run(
        self,
        stage: Callable[..., Iterator[Any]],
        name: str,
        fold: int,
        settings: recipe.Quantize = BEST,
        **inputs: str,
    ) -> None:
        """A stage of the SQL recipe, on a fold's rows, into the folder `name`."""
        made = recipe.Recipe(
            model=recipe.Model(source="builtin:smollm2", device=self.device),
            data=recipe.Data(
                source=str(self.work / f"data-{fold}"), chat_template=False, max_seq_len=128
            ),
            train=recipe.Train(
                epochs=self.epochs,
                row_tokens=1024,
                learning_rate=1e-3,
                warmup_steps=10,
                valid_every=16,
                valid_rows=VALID_ROWS,
                checkpoint_every=0,
                compile=False,  # takes longer than these few updates
            ),
            quantize=settings,
            qat=recipe.Qat(steps=self.qat),
            evaluate=recipe.Evaluate(rows=10**6, generate_rows=10**6, batch_rows=128),
            deploy=recipe.Deploy(targets=()),
            seed=fold,
        )
        run_stage(self.work, stage, name, made, **inputs)

    def answered(self, label: str) -> dict[str, float]:
        """Whether an answer is right, by fold and place of the row."""
        found = {}
        for fold in range(FOLDS):
            scores = read_scores(self.work / f"{label}-{fold}")
            for one in scores["samples"] if scores else ():
                found[f"{fold}: {one['where']}"] = float(one["equal"])
        return found

    def loss(self, label: str) -> list[float]:
        """Nats a token of held-out answers, by fold."""
        found = [read_scores(self.work / f"{label}-{fold}") for fold in range(FOLDS)]
        return [round(scores["loss"], 4) for scores in found if scores]

    def row(self) -> common.Row:
        """Exact match of all folds' rows, and how far each is from bfloat16's."""
        before, right = self.answered("bf16"), {name: self.answered(name) for name in LABELS}
        share = {k: round(100 * float(np.mean([*v.values()])), 2) for k, v in right.items() if v}
        bits = {way: bits_per_weight(self.work / f"small-{way}-0") for way in WAYS}
        return common.Row(
            name="task-score-qat",
            value=share["best, qat"],
            unit=f"% of {len(right['best, qat'])} held-out SQL answers exactly right",
            better="higher",
            limit=share["bf16"],
            peers={label: value for label, value in share.items() if label != "best, qat"},
            notes={
                "points from bf16 on the same rows, and the standard error": {
                    label: _away(before, right[label]) for label in share if label != "bf16"
                },
                "standard error of bf16 itself": _error(np.array([*before.values()])),
                "loss by fold": {label: self.loss(label) for label in share},
                "bits per weight": {way: round(found, 3) for way, found in bits.items()},
                "epochs": self.epochs,
                "updates of the scales": self.qat,
            },
        )


def tables(fold: int) -> list[list[str]]:
    """The rows of each table in a fold, as lines; tables are dealt out in a drawn order."""
    found: dict[str, list[str]] = {}
    for split in ("train", "valid", "test"):
        for line in (DATA / f"{split}.jsonl").read_text().splitlines(keepends=True):
            found.setdefault(table(line), []).append(line)
    names = sorted(found)
    random.Random(0).shuffle(names)
    return [found[name] for name in names[fold::FOLDS]]


def table(line: str) -> str:
    """What a row tells of its table: the columns."""
    return json.loads(line)["prompt"].partition("\n")[0]


def _away(before: dict[str, float], after: dict[str, float]) -> list[float]:
    rows = sorted(set(before) & set(after))
    moved = np.array([after[row] - before[row] for row in rows])
    return [round(100 * float(moved.mean()), 2), _error(moved)]


def _error(values: np.ndarray) -> float:
    return round(100 * float(values.std(ddof=1)) / math.sqrt(len(values)), 2)


if __name__ == "__main__":
    main()
