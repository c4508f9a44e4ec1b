"""Frozen weights in FP8 beside bfloat16, by what the adapters are worth: question -> SQL, held out.

Adapters of the built-in small model in pairs: a seed's two begin alike and meet the same rows in
the same order. Answers of validation and test rows are scored: FP8's adapter on the bfloat16 base,
as it is deployed, and as its training computes them. Single trainings scatter more than FP8
changes, so the figure is the mean of the pairs, its spread that mean's standard error.
"""

import argparse
import json
import math
import multiprocessing
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import gpu_common
from pippin import recipe

KINDS: tuple[recipe.FrozenDType, ...] = ("auto", "float8")
# Lower than the recipe's rate: trainings part less.
RATE, ROW_TOKENS, WARMUP = 5e-4, 1024, 10


def main() -> None:
    """Train what `--work` does not hold yet; a row of whole pairs."""
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--work", type=Path, help="a folder that keeps what was made")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--rows", type=int, default=10**6, help="of each split")
    parser.add_argument("--workers", type=int, default=6, help="trainings at a time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        work = options.work or Path(scratch)
        train_all(options, work)
        found = {path.stem: json.loads(path.read_text()) for path in work.glob("seed-*.json")}
        common.report([row(found, options.epochs)], options.save, gpu_common.device())


def train_all(options: argparse.Namespace, work: Path) -> None:
    """Side by side, the pairs one after another."""
    from pippin.stages.fetch import fetch
    from stage_runs import run_stage

    if not (work / "model").exists():
        run_stage(work, fetch, "model", asked_of(0, "auto", options.epochs))
    asked = [
        Training(work=work, seed=seed, kind=kind, epochs=options.epochs, rows=options.rows)
        for seed in range(options.first, options.first + options.seeds)
        for kind in KINDS
    ]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=context) as pool:
        for done in as_completed([pool.submit(one.run) for one in asked if not one.place.exists()]):
            print(done.result(), flush=True)


def asked_of(seed: int, kind: recipe.FrozenDType, epochs: float) -> recipe.Recipe:
    """The SQL recipe's task."""
    data = common.ROOT / "recipes" / "data" / "sql"
    return recipe.Recipe(
        model=recipe.Model(source="builtin:smollm2", dtype="bfloat16"),
        data=recipe.Data(source=str(data), chat_template=False, max_seq_len=128),
        lora=recipe.Lora(rank=16, alpha=32.0, targets=("all-linear",)),
        train=recipe.Train(
            epochs=epochs,
            row_tokens=ROW_TOKENS,
            learning_rate=RATE,
            warmup_steps=WARMUP,
            frozen_dtype=kind,
        ),
        seed=seed,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """One adapter, in a process of its own."""

    work: Path
    seed: int
    kind: recipe.FrozenDType
    epochs: float
    rows: int

    @property
    def place(self) -> Path:
        """Of its losses."""
        return self.work / f"seed-{self.seed:03d}-{self.kind}.json"

    def run(self) -> str:
        """Train it and write down what it loses; a line to read."""
        from pippin.model.adapter import adapted_linears, new_adapter
        from pippin.model.weights import Checkpoint

        began, made = time.monotonic(), asked_of(self.seed, self.kind, self.epochs)
        first = new_adapter(
            adapted_linears(Checkpoint(self.work / "model"), made.lora), made.lora, self.seed
        )
        trainer = self.start(made, first)
        before = self.loss(trainer, made)
        updates = self.follow(trainer, made)
        losses = {"before": before, "after": self.loss(trainer, made)}
        if self.kind != "auto":
            plain = self.start(asked_of(self.seed, "auto", self.epochs), trainer.weights())
            losses["on bf16"] = self.loss(plain, made)
        self.place.write_text(json.dumps({**losses, "updates": updates}))
        return f"{self.place.stem}: {losses}, {time.monotonic() - began:.0f} s, {trainer.notices}"

    def start(self, made: recipe.Recipe, first: Any) -> Any:
        """A trainer of these weights."""
        from pippin.engines import load_engine

        model = load_engine("torch").load(self.work / "model", made.model.dtype)
        return model.trainer(made.train, made.lora, first, self.seed)

    def follow(self, trainer: Any, made: recipe.Recipe) -> int:
        """All updates; how many."""
        from pippin.data.batches import BatchPlan
        from pippin.stages.schedule import learning_rate, total_steps

        plan = BatchPlan(self.samples(made, "train"), made.train, self.seed)
        total = total_steps(made.train, plan.steps_per_epoch)
        for step in range(total):
            result = trainer.step(
                plan.batches(step),
                learning_rate(made.train, step, total),
                lambda step=step: plan.batches(step + 1) if step + 1 < total else (),
            )
            assert math.isfinite(result.loss_sum), f"update {step} of {self.place.stem}"
        return total

    def samples(self, made: recipe.Recipe, split: str) -> Any:
        """Tokenized rows."""
        from pippin.data.chat import tokenize
        from pippin.data.dataset import load_split
        from pippin.model.tokenizer import load_tokenizer

        rows = load_split(made.data, made.folder, split)[: self.rows]
        return tokenize(rows, load_tokenizer(self.work / "model"), made.data).samples

    def loss(self, trainer: Any, made: recipe.Recipe) -> float:
        """Nats a token of the held-out answers."""
        from pippin.data.batches import BatchPlan

        sums = []
        for split in ("valid", "test"):
            plan = BatchPlan(self.samples(made, split), made.train, 0)
            for step in range(plan.steps_per_epoch):
                sums += [trainer.loss(batch) for batch in plan.batches(step)]
        return math.fsum(total for total, _ in sums) / sum(count for _, count in sums)


def row(found: dict[str, dict[str, float]], epochs: float) -> common.Row:
    """Of the seeds whose two trainings are there."""
    sides = [{n.removesuffix(f"-{k}"): x for n, x in found.items() if n.endswith(k)} for k in KINDS]
    pairs = [(sides[0][name], sides[1][name]) for name in sorted(sides[0].keys() & sides[1].keys())]
    own, moved = (
        [100 * (other[key] / plain["after"] - 1) for plain, other in pairs]
        for key in ("after", "on bf16")
    )
    return common.Row(
        name="lora-fp8-quality",
        value=round(statistics.mean(moved), 2),
        unit="% more held-out loss than bf16's, its adapter on the bf16 base, mean of the pairs",
        better="lower",
        spread=standard_error(moved),
        notes={
            "computed in FP8": round(statistics.mean(own), 2),
            "its standard error": standard_error(own),
            "by seed": [round(x, 2) for x in moved],
            "computed in FP8 by seed": [round(x, 2) for x in own],
            "bf16": [round(plain["after"], 4) for plain, _ in pairs],
            "before training": [round(side["before"], 4) for side in pairs[0]],
            "updates": pairs[0][0]["updates"],
            "epochs": epochs,
            "tokens an update": ROW_TOKENS,
            "learning rate": RATE,
        },
    )


def standard_error(values: list[float]) -> float:
    """Of their mean."""
    return round(statistics.stdev(values) / math.sqrt(len(values)), 2) if len(values) > 1 else 0.0


if __name__ == "__main__":
    main()
