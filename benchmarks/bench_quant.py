"""KL divergence of quantized models to the bfloat16 one, method beside method and peer beside peer.

The reference is the built-in small model moved off the 4-bit grid it was distributed on: every
weight dithered by up to half a step, then a short full fine-tune. Text is cut in three: one part
tunes the reference (with Shakespeare and SQL rows), one calibrates, one is scored. Without `--text`
(WikiText-2, say) it is the plays of recipes/data.

Bits are those of a linear's weight, 2-byte scales counted, and zero points where the scheme has
them; the embedding has 8 bits unless the row says `all`. With `--work` every measurement is kept as
it is made: `--at-most 1` makes one a call, and the rows are printed when all are there, or with
`--save` of what is there.
"""

import argparse
import itertools
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import common
import quant_peers
from pippin import recipe
from pippin.artifact import Origin
from pippin.job import Job
from pippin.model.quantized import DenseView, bits_per_weight
from pippin.model.weights import Tensors
from pippin.stages import quantize_work
from pippin.stages.calibration import Calibration, calibrate
from pippin.stages.fetch import fetch
from pippin.stages.quantize import quantize
from pippin.stages.train import train
from quant_rows import AFFINE, ROWS, TOKENS
from quant_ruler import LENGTH, Ruler, Score, dither

DATA = common.ROOT / "recipes" / "data"
STEPS = 16


def main() -> None:
    """Make or take the reference, score every method and peer on it, print the rows."""
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--text", type=Path, default=DATA / "shakespeare" / "train.txt")
    parser.add_argument("--work", type=Path, help="a folder that keeps reference and measurements")
    parser.add_argument("--at-most", type=int, default=999, help="measurements in this call")
    parser.add_argument(
        "--only", nargs="*", default=[""], help="measurements whose name contains one of these"
    )
    parser.add_argument("--tokens", type=int, default=TOKENS, help="that calibrate")
    parser.add_argument(
        "--all-text", action="store_true", help="the part that tuned the reference calibrates too"
    )
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)  # waiting threads would count as work on a busy machine
    with tempfile.TemporaryDirectory() as scratch:
        work = options.work or Path(scratch) / "work"
        work.mkdir(exist_ok=True)
        desk = Desk(Path(scratch), options.text, work, (options.device, options.tokens))
        if options.all_text:
            desk.calibrate_on_all()
        if not (work / "reference").exists():
            shutil.copytree(desk.make_reference(), work / "reference")
            if options.work and options.at_most < 999:
                return
        measured = desk.measure(work, options)
    rows = [name for name in ROWS if f"{name}: {next(iter(ROWS[name]))}" in measured]
    common.report([desk.row(name, measured) for name in rows], options.save)


@dataclass(kw_only=True)
class Stored(Calibration):
    """Moments in a file, which a later call finds."""

    file: Path

    def _moments(self, part: Mapping[str, str]) -> dict[str, np.ndarray]:
        if not self._read[0] and self.file.exists():
            kept = dict(np.load(self.file))
            self._read = (frozenset(kept), kept)
        before = self._read[0]
        moments = super()._moments(part)
        if self._read[0] != before:
            np.savez(self.file, **moments)
        return moments


class Desk:
    """A folder for everything in between, and the three parts of the text."""

    def __init__(
        self, folder: Path, text: Path, work: Path, how: tuple[recipe.DeviceName, int]
    ) -> None:
        """`how` is the device, and the tokens that calibrate."""
        self.folder, self.name, self.work = folder, text.stem, work
        self.device, self.tokens = how
        self.calibrations: dict[bool, Calibration] = {}
        quantize_work.calibrate = self.calibrate
        whole = text.read_text()
        cuts = [0, int(0.45 * len(whole)), int(0.9 * len(whole)), len(whole)]
        tuning, calibration, self.scored = (whole[a:b] for a, b in itertools.pairwise(cuts))
        plays, queries = (
            (DATA / name).read_text() for name in ("shakespeare/valid.txt", "sql/valid.jsonl")
        )
        for part, said in {"tuning": tuning + plays + queries, "calibration": calibration}.items():
            (folder / part).mkdir()
            for split in ("train", "valid", "test"):
                (folder / part / f"{split}.txt").write_text(
                    said if split == "train" else said[:9999]
                )

    def calibrate_on_all(self) -> None:
        """Calibrate on what tuned the reference as well; the scored part stays apart."""
        parts = [self.folder / part / "train.txt" for part in ("tuning", "calibration")]
        parts[1].write_text("".join(part.read_text() for part in parts))

    def calibrate(self, job: Job, checkpoint: Tensors, *, large: bool = False) -> Calibration:
        """Read once for all settings that weigh inputs alike; the seconds count it once.

        Recovery uses the model up, and has one of its own.
        """
        settings = job.recipe.quantize
        if settings.sequential:
            return calibrate(job, checkpoint, large=large)
        by_loss = settings.method == "best" and settings.importance == "loss"
        if by_loss not in self.calibrations or settings.recover_tokens:
            made = calibrate(job, checkpoint, large=large)
            values = {f.name: getattr(made, f.name) for f in fields(made) if f.init}
            file = self.work / f"moments-{'loss' if by_loss else 'inputs'}-{self.tokens}.npz"
            self.calibrations = {by_loss: Stored(**values, file=file)}
        return self.calibrations[by_loss]

    def moments(self, reference: Path) -> Path:
        """X^T X by linear, all inputs alike, in a file."""
        file = self.work / f"moments-inputs-{self.tokens}.npz"
        if not file.exists():
            asked = replace(AFFINE, method="gptq", calibration_tokens=self.tokens)
            self.run(quantize, self.asked("calibration", quantize=asked), reference)
        return file

    def asked(self, part: str, **tables: Any) -> recipe.Recipe:
        """Text of one part, in samples of LENGTH tokens."""
        data = recipe.Data(source=part, format="text", max_seq_len=LENGTH)
        model = recipe.Model(source="builtin:smollm2", device=self.device)
        none = recipe.Deploy(targets=())
        return recipe.Recipe(model=model, data=data, deploy=none, folder=self.folder, **tables)

    def run(self, stage: Callable[[Job], Iterator[Any]], made: recipe.Recipe, model: Path) -> Path:
        """The folder a stage leaves."""
        out = self.folder / stage.__name__
        shutil.rmtree(out, ignore_errors=True)
        origin = Origin(stage=stage.__name__, inputs={}, settings={}, versions={})
        inputs = {} if stage is fetch else {"model": model}
        for _ in stage(
            Job(stage=stage.__name__, recipe=made, inputs=inputs, folder=out, origin=origin)
        ):
            pass
        return out

    def make_reference(self) -> Path:
        """The small model, dithered and tuned, in bfloat16."""
        fetched = self.run(fetch, self.asked("tuning"), Path())
        dithered = self.folder / "dithered"
        dither(fetched, dithered)
        tuned = recipe.Train(
            method="full",
            steps=STEPS,
            row_tokens=2 * LENGTH,
            learning_rate=3e-4,
            warmup_steps=6,
            valid_rows=1,
            beta2=0.95,
            checkpoint_every=0,
        )
        return self.run(train, self.asked("tuning", train=tuned), dithered)

    def measure(self, work: Path, options: argparse.Namespace) -> dict[str, Any]:
        """Every figure by `row: label`; none while some are to be measured, but with --save."""
        kept = work / "scores.json"
        found = json.loads(kept.read_text()) if kept.exists() else {}
        asked = [(f"{name}: {label}", how) for name in ROWS for label, how in ROWS[name].items()]
        missing = [(key, how) for key, how in asked if key not in found]
        todo = sorted(
            (pair for pair in missing if any(part in pair[0] for part in options.only)),
            key=_first_things_first,
        )
        todo = todo[: options.at_most]
        if todo:
            ruler = Ruler(work / "reference", self.scored, self.device)
        for key, how in todo:
            if isinstance(how, recipe.Quantize):
                score = self.score(ruler, work / "reference", how)
            else:
                score = ruler.peer(how, self.moments(work / "reference"))
            found[key] = {**asdict(score), "perplexity": ruler.perplexity, "tokens": ruler.tokens}
            kept.write_text(json.dumps(found, indent=1))
            print(f"{key}: KL {score.kl:.4f}, top-1 {score.top1:.4f}, {score.seconds:.0f} s")
        return found if len(found) == len(asked) or options.save else {}

    def row(self, name: str, found: dict[str, Any]) -> common.Row:
        """The first of a row's figures, beside the others."""
        keys = {label: f"{name}: {label}" for label in ROWS[name]}
        scores = {label: found[key] for label, key in keys.items() if key in found}
        first, *others = scores
        best = scores[first]
        return common.Row(
            name=name,
            value=round(best["kl"], 4),
            unit=f"nats a token to bfloat16, {self.name}, {best['tokens']} tokens",
            better="lower",
            peers={label: round(scores[label]["kl"], 4) for label in others},
            notes={
                "ours": first,
                "top-1": {label: round(s["top1"], 4) for label, s in scores.items()},
                "CPU-seconds": {label: round(s["seconds"]) for label, s in scores.items()},
                "bits per weight in our layout": {
                    label: round(s["bits"], 3) for label, s in scores.items() if s["bits"]
                },
                "shared out": {k: s["notes"] for k, s in scores.items() if s["notes"]},
                "perplexity of the reference": round(best["perplexity"], 2),
                "tokens that calibrate": self.tokens,
                "packages": quant_peers.versions(),
            },
        )

    def score(self, ruler: Ruler, reference: Path, settings: recipe.Quantize) -> Score:
        """Quantize, then measure."""
        more = {"calibration_tokens": self.tokens}
        if settings.recover_tokens:
            more["recover_tokens"] = settings.recover_tokens * self.tokens // TOKENS
        made = self.asked("calibration", quantize=replace(settings, **more))
        start = time.process_time()
        folder = self.run(quantize, made, reference)
        seconds = time.process_time() - start
        view = DenseView(folder)
        measured = ruler.measure({name: view.read(name) for name in view.tensors})
        budget = json.loads((folder / "quantize.json").read_text()).get("budget", {})
        notes = {key: value for key, value in budget.items() if key != "curve"}
        return replace(measured, bits=bits_per_weight(folder), seconds=seconds, notes=notes)


def _first_things_first(asked: tuple[str, Any]) -> int:
    """Our own figures at 4.5 bits, the peers, our figures of the other rows, then all else."""
    key, how = asked
    if key.endswith("shared out, symmetric") and "4.5: best" in key:
        return 0
    if not isinstance(how, recipe.Quantize):
        return 1
    return 2 if "shared out, symmetric" in key else 3


if __name__ == "__main__":
    main()
