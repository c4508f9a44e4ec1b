"""How much of an adapter's gain is left at 4.5 bits: from original weights, and from a 4-bit base.

The adapter is trained on a base of 4 bits in groups of 64, as people with little memory do; the
original is the built-in small model moved off the grid it was distributed on (or `--original`, in
bfloat16). Kept is the share of the adapter's gain on held-out answers, measured beside the weights
that it is merged into, that the small model still has. `best, qat` are the same codes after some
updates of their scales. The peer is mlx-lm: `fuse`, which rounds the sum into the base's own 4
bits, or `fuse` and `convert` from the original. With `--work` what was made is kept: `--at-most 1`
makes one thing a call, and the rows are printed of what is there.
"""

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import common
from pippin import recipe
from pippin.job import Job
from pippin.model.adapter import BASE
from pippin.model.quantized import bits_per_weight
from pippin.stages import distribution
from pippin.stages.evaluate import evaluate
from pippin.stages.fetch import fetch
from pippin.stages.merge import merge
from pippin.stages.qat import qat
from pippin.stages.quantize import quantize
from pippin.stages.train import train
from quant_ruler import dither
from stage_runs import run_stage

DATA = common.ROOT / "recipes" / "data" / "sql"
NEAREST = recipe.Quantize(
    method="rtn",
    bits=4,
    group_size=64,
    scheme="affine",
    embed_bits=8,
    embed_group_size=64,
    embed_scheme="affine",
)
BEST = replace(NEAREST, method="best", importance="inputs", calibration_tokens=4096)
# Where the merged weights come from, by figure.
FIGURES = {"gain-kept-original": "original", "gain-kept-4bit-base": "base"}
# Ours first, the peer, ours going on.
LABELS = ("best", "mlx_lm", "best, qat", "nearest")


def main() -> None:
    """Make what is missing, print the rows when all is there."""
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--original", type=Path, help="a folder; dithered without")
    parser.add_argument("--work", type=Path, help="a folder that keeps what was made")
    parser.add_argument("--at-most", type=int, default=999, help="things to make in this call")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16, help="updates of each adapter")
    parser.add_argument("--qat", type=int, default=8, help="updates of the scales after it")
    options = parser.parse_args()
    torch.set_num_threads(1)  # waiting threads would count as work on a busy machine
    with tempfile.TemporaryDirectory() as scratch:
        desk = Desk(
            work=options.work or Path(scratch),
            steps=options.steps,
            qat=options.qat,
            seeds=range(options.seeds),
        )
        made = 0
        for name, make in desk.things(options.original):
            if made == options.at_most:
                break
            if not (desk.work / name).exists():
                began = time.process_time()
                make()
                made += 1
                print(f"{name}: {time.process_time() - began:.0f} CPU-s", file=sys.stderr)
        measured = [name for name in FIGURES if any(desk.work.glob(f"score-{name}-*"))]
        common.report([desk.row(name) for name in measured], options.save)


@dataclass(frozen=True, kw_only=True, slots=True)
class Desk:
    """Folders by name in `work`; what is there is not made again."""

    work: Path
    steps: int
    qat: int
    seeds: range

    def things(self, original: Path | None) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Everything there is to make, in order, by its folder's name."""
        yield "original", partial(self.make_original, original)
        yield "base", partial(self.run, quantize, "base", 0, NEAREST, model="original")
        for source in FIGURES.values():
            name = f"score-{source}"
            yield name, partial(self.run, evaluate, name, 0, model=source)
        for seed in self.seeds:
            adapter = f"adapter-{seed}"
            yield adapter, partial(self.run, train, adapter, seed, model="base")
        for source, seed in itertools.product(FIGURES.values(), self.seeds):
            live = f"score-live-{source}-{seed}"
            yield live, partial(self.live, live, source, seed)
        for label, (figure, source), seed in itertools.product(LABELS, FIGURES.items(), self.seeds):
            name = f"score-{figure}-{label}-{seed}"
            yield name, partial(self.measure, name, label, source, seed)

    def make_original(self, original: Path | None) -> None:
        """The given folder, or the small model off its grid."""
        if original is not None:
            shutil.copytree(original, self.work / "original")
            return
        self.run(fetch, "fetched", 0)
        dither(self.work / "fetched", self.work / "original")

    def measure(self, name: str, label: str, source: str, seed: int) -> None:
        """Make a small model and score it; its folder goes again where none goes on from it."""
        small, best = f"small-{source}-{seed}", f"best-{source}-{seed}"
        both = {"model": source, "adapter": self.adapter(source, seed)}
        if label == "mlx_lm":
            self.peer(*both.values(), small)
        elif label == "nearest":
            self.round(small, seed, NEAREST, both)
        else:
            if not (self.work / best).exists():
                self.round(best, seed, BEST, both)
            if label != "best":
                self.run(qat, small, seed, model=best)
        made = best if label == "best" else small
        self.run(evaluate, name, seed, model=made)
        bits = bits_per_weight(self.work / made)
        (self.work / name / "bits.json").write_text(json.dumps(bits))
        if label != "best":
            shutil.rmtree(self.work / small)

    def live(self, name: str, source: str, seed: int) -> None:
        """Score the adapter beside the weights that it will be merged into."""
        self.run(evaluate, name, seed, model=source, adapter=self.adapter(source, seed))

    def adapter(self, source: str, seed: int) -> str:
        """The adapter's folder; for the original a copy that does not tell its base's digest."""
        name = f"adapter-{seed}"
        if source == "base":
            return name
        other = self.work / f"{name}-elsewhere"
        shutil.copytree(self.work / name, other, dirs_exist_ok=True)
        (other / BASE).unlink(missing_ok=True)
        return other.name

    def round(self, name: str, seed: int, settings: recipe.Quantize, both: dict[str, str]) -> None:
        """Merge and quantize."""
        self.run(merge, f"merged-{name}", seed, **both)
        self.run(quantize, name, seed, settings, model=f"merged-{name}")
        shutil.rmtree(self.work / f"merged-{name}")

    def peer(self, model: str, adapter: str, name: str) -> None:
        """mlx-lm's own programs as they are called by default, codes at the end."""
        fused, small = self.work / f"fused-{name}", self.work / name
        for folder in (fused, small):
            shutil.rmtree(folder, ignore_errors=True)
        adapters = self.work / adapter / "mlx-lm"
        mlx_lm("fuse", model=self.work / model, adapter_path=adapters, save_path=fused)
        if model == "base":
            fused.rename(small)
            return
        mlx_lm("convert", hf_path=fused, mlx_path=small, quantize="", q_bits=4, q_group_size=64)
        shutil.rmtree(fused)

    def run(
        self,
        stage: Callable[[Job], Iterator[Any]],
        name: str,
        seed: int,
        settings: recipe.Quantize = NEAREST,
        **inputs: str,
    ) -> None:
        """A stage of the SQL recipe into the folder `name`."""
        made = recipe.Recipe(
            model=recipe.Model(source="builtin:smollm2", device="cpu", dtype="float32"),
            data=recipe.Data(source=str(DATA), chat_template=False, max_seq_len=128),
            lora=recipe.Lora(rank=8, alpha=16.0, mlx_lm=True),
            train=recipe.Train(
                steps=self.steps,
                row_tokens=512,
                learning_rate=2e-3,
                warmup_steps=3,
                valid_rows=40 if stage is qat else 1,
                checkpoint_every=4,
            ),
            quantize=settings,
            qat=recipe.Qat(steps=self.qat),
            evaluate=recipe.Evaluate(rows=48, generate_rows=0),
            deploy=recipe.Deploy(targets=()),
            seed=seed,
        )
        run_stage(self.work, stage, name, made, **inputs)

    def loss(self, name: str) -> float:
        """Nats a token of held-out answers."""
        return json.loads((self.work / name / "scores.json").read_text())["loss"]

    def away(self, name: str, live: str) -> list[float]:
        """Nats a token above the live adapter on the same rows, and that one's standard error."""
        before, made = (distribution.load(self.work / each) for each in (live, name))
        scatter = before.losses_S - before.loss * before.counts_S
        error = float(np.sqrt(np.square(scatter).sum()) / before.counts_S.sum())
        return [round(made.loss - before.loss, 4), round(error, 4)]

    def row(self, figure: str) -> common.Row:
        """Shares kept, the mean of the seeds that were measured."""
        source, bits = FIGURES[figure], dict[str, float]()
        base = self.loss(f"score-{source}")
        kept: dict[str, list[float]] = {}
        away: dict[str, list[list[float]]] = {}
        for label, seed in itertools.product(LABELS, self.seeds):
            name, live = f"score-{figure}-{label}-{seed}", f"score-live-{source}-{seed}"
            if (self.work / name).exists():
                gain = base - self.loss(live)
                kept.setdefault(label, []).append((base - self.loss(name)) / gain)
                away.setdefault(label, []).append(self.away(name, live))
                bits[label] = json.loads((self.work / name / "bits.json").read_text())
        means = {k: round(100 * statistics.mean(shares), 1) for k, shares in kept.items()}
        ours = next(iter(kept))
        lives = sorted(self.work.glob(f"score-live-{source}-*"))
        return common.Row(
            name=figure,
            value=means[ours],
            unit="% of the adapter's gain on held-out SQL rows, mean of the seeds",
            better="higher",
            spread=round(100 * (max(kept[ours]) - min(kept[ours])), 1),
            peers={k: mean for k, mean in means.items() if "best" not in k},
            notes={
                "trained on since": means.get("best, qat"),
                "by seed": {k: [round(100 * share, 1) for share in v] for k, v in kept.items()},
                "loss before the adapter": round(base, 3),
                "with the adapter": [round(self.loss(live.name), 3) for live in lives],
                "loss above it, and its standard error": away,
                "bits per weight": {label: round(found, 3) for label, found in bits.items()},
                "updates": self.steps,
                "of the scales": self.qat,
            },
        )


def mlx_lm(program: str, **options: Any) -> None:
    """One of mlx-lm's programs; an option without a value is a switch."""
    given = [(f"--{name.replace('_', '-')}", str(value)) for name, value in options.items()]
    words = [word for pair in given for word in pair if word]
    command = [sys.executable, "-m", "mlx_lm", program, *words]
    subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})


if __name__ == "__main__":
    main()
