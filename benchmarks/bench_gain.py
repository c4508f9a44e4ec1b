"""How much of an adapter's gain is left at 4.5 bits: from original weights, and from a 4-bit base.

The adapter is trained on a base of 4 bits in groups of 64, as people with little memory do; the
original is the built-in small model moved off the grid it was distributed on (or `--original`, in
bfloat16). Kept is the share of the adapter's gain on held-out answers that the small model still
has. The peer is `mlx_lm.fuse`, which rounds the sum into the base's own 4 bits. With `--work`
everything that was made is kept: `--at-most 1` makes one thing a call, and the rows are printed of
what is there.
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

import torch

import common
from pippin import artifact, recipe
from pippin.artifact import Origin
from pippin.job import Job
from pippin.model.quantized import bits_per_weight
from pippin.stages.evaluate import evaluate
from pippin.stages.fetch import fetch
from pippin.stages.merge import merge
from pippin.stages.quantize import quantize
from pippin.stages.train import train
from quant_ruler import dither

DATA = common.ROOT / "recipes" / "data" / "sql"
NEAREST = recipe.Quantize(method="rtn", bits=4, group_size=64, scheme="affine", embed_bits=8)
BEST = replace(NEAREST, method="best", importance="inputs", calibration_tokens=4096)
# By figure: where the merged weights come from, and how they are rounded. The first is ours.
WAYS: dict[str, dict[str, tuple[str, recipe.Quantize | None]]] = {
    "gain-kept-4bit-base": {
        "best": ("base", BEST),
        "mlx_lm.fuse": ("base", None),
        "nearest": ("base", NEAREST),
    },
    "gain-kept-original": {
        "best": ("original", BEST),
        "nearest": ("original", NEAREST),
    },
}


def main() -> None:
    """Make what is missing, print the rows when all is there."""
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--original", type=Path, help="a folder; dithered without")
    parser.add_argument("--work", type=Path, help="a folder that keeps what was made")
    parser.add_argument("--at-most", type=int, default=999, help="things to make in this call")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16, help="updates of each adapter")
    options = parser.parse_args()
    torch.set_num_threads(1)  # waiting threads would count as work on a busy machine
    with tempfile.TemporaryDirectory() as scratch:
        desk = Desk(
            work=options.work or Path(scratch), steps=options.steps, seeds=range(options.seeds)
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
        measured = [name for name in WAYS if any(desk.work.glob(f"score-{name}-*"))]
        common.report([desk.row(name) for name in measured], options.save)


@dataclass(frozen=True, kw_only=True, slots=True)
class Desk:
    """Folders by name in `work`; what is there is not made again."""

    work: Path
    steps: int
    seeds: range

    def things(self, original: Path | None) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Everything there is to make, in order, by its folder's name."""
        yield "original", partial(self.make_original, original)
        yield "base", partial(self.run, quantize, "base", 0, NEAREST, model="original")
        yield "score-base", partial(self.run, evaluate, "score-base", 0, model="base")
        for seed in self.seeds:
            adapter, live = f"adapter-{seed}", f"score-live-{seed}"
            yield adapter, partial(self.run, train, adapter, seed, model="base")
            both = {"model": "base", "adapter": adapter}
            yield live, partial(self.run, evaluate, live, seed, **both)
            for figure, ways in WAYS.items():
                for label, (source, settings) in ways.items():
                    name = f"score-{figure}-{label}-{seed}"
                    yield name, partial(self.measure, name, source, settings, seed)

    def make_original(self, original: Path | None) -> None:
        """The given folder, or the small model off its grid."""
        if original is not None:
            shutil.copytree(original, self.work / "original")
            return
        self.run(fetch, "fetched", 0)
        dither(self.work / "fetched", self.work / "original")

    def measure(self, name: str, source: str, settings: recipe.Quantize | None, seed: int) -> None:
        """Merge, round, score; the folders in between go again."""
        small, adapter = self.work / "small", f"adapter-{seed}"
        shutil.rmtree(small, ignore_errors=True)
        if settings is None:
            fuse(self.work / source, self.work / adapter / "mlx-lm", small)
        else:
            self.run(merge, "merged", seed, model=source, adapter=adapter)
            self.run(quantize, "small", seed, settings, model="merged")
        bits = bits_per_weight(small)
        self.run(evaluate, name, seed, model="small")
        (self.work / name / "bits.json").write_text(json.dumps(bits))

    def run(
        self,
        stage: Callable[[Job], Iterator[Any]],
        name: str,
        seed: int,
        settings: recipe.Quantize = NEAREST,
        **inputs: str,
    ) -> None:
        """A stage of the SQL recipe into the folder `name`."""
        if name in ("merged", "small"):
            shutil.rmtree(self.work / name, ignore_errors=True)
        made = recipe.Recipe(
            model=recipe.Model(source="builtin:smollm2", device="cpu", dtype="float32"),
            data=recipe.Data(source=str(DATA), chat_template=False, max_seq_len=128),
            lora=recipe.Lora(rank=8, alpha=16.0, mlx_lm=True),
            train=recipe.Train(
                steps=self.steps,
                row_tokens=512,
                learning_rate=2e-3,
                warmup_steps=3,
                valid_rows=1,
                checkpoint_every=4,
            ),
            quantize=settings,
            evaluate=recipe.Evaluate(rows=48, generate_rows=0),
            deploy=recipe.Deploy(targets=()),
            seed=seed,
        )
        folders = {role: self.work / folder for role, folder in inputs.items()}
        digests = {role: artifact.digest(folder) for role, folder in folders.items()}
        origin = Origin(stage=stage.__name__, inputs=digests, settings={"seed": seed}, versions={})
        job = Job(
            stage=stage.__name__,
            recipe=made,
            inputs=folders,
            folder=self.work / name,
            origin=origin,
            subject="base",
        )
        for _ in stage(job):
            pass

    def loss(self, name: str) -> float:
        """Nats a token of held-out answers."""
        return json.loads((self.work / name / "scores.json").read_text())["loss"]

    def row(self, figure: str) -> common.Row:
        """Shares kept, the mean of the seeds that were measured."""
        base = self.loss("score-base")
        kept: dict[str, list[float]] = {}
        for label, seed in itertools.product(WAYS[figure], self.seeds):
            name = f"score-{figure}-{label}-{seed}"
            if (self.work / name).exists():
                gain = base - self.loss(f"score-live-{seed}")
                kept.setdefault(label, []).append((base - self.loss(name)) / gain)
        first, *others = kept
        lives = [s for s in self.seeds if (self.work / f"score-live-{s}").exists()]
        return common.Row(
            name=figure,
            value=round(100 * statistics.mean(kept[first]), 1),
            unit="% of the adapter's gain on held-out SQL rows, mean of the seeds",
            better="higher",
            spread=round(100 * (max(kept[first]) - min(kept[first])), 1),
            peers={label: round(100 * statistics.mean(kept[label]), 1) for label in others},
            notes={
                "by seed": {k: [round(100 * share, 1) for share in v] for k, v in kept.items()},
                "loss of the 4-bit base": round(base, 3),
                "with the adapter": [round(self.loss(f"score-live-{s}"), 3) for s in lives],
                "bits per weight": {w: round(self.bits(figure, w), 3) for w in kept},
                "updates": self.steps,
            },
        )

    def bits(self, figure: str, way: str) -> float:
        """Of the whole model, embedding included."""
        file = next(self.work.glob(f"score-{figure}-{way}-*/bits.json"))
        return json.loads(file.read_text())


def fuse(model: Path, adapter: Path, target: Path) -> None:
    """mlx-lm's own program, as it is called by default."""
    names = {"model": model, "adapter-path": adapter, "save-path": target}
    options = [part for name, path in names.items() for part in (f"--{name}", str(path))]
    command = [sys.executable, "-m", "mlx_lm", "fuse", *options]
    subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})


if __name__ == "__main__":
    main()
