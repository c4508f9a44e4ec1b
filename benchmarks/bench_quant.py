"""KL divergence of quantized models to the bfloat16 one, method beside method and peer beside peer.

The reference is the built-in small model moved off the 4-bit grid it was distributed on: every
weight dithered by up to half a step, then a short full fine-tune. Text is cut in three: one part
tunes the reference (with Shakespeare and SQL rows), one calibrates, one is scored. Without `--text`
(WikiText-2, say) it is the plays of recipes/data.
"""

import itertools
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

import common
from pippin import recipe
from pippin.artifact import Origin
from pippin.engines import load_engine
from pippin.job import Job
from pippin.model import names
from pippin.model.config import read_config
from pippin.model.quantized import DenseView, bits_per_weight
from pippin.model.source import copy_side_files
from pippin.model.tokenizer import load_tokenizer
from pippin.model.weights import Checkpoint, Writer
from pippin.quantizers import QUANTIZERS
from pippin.stages.fetch import fetch
from pippin.stages.quantize import quantize
from pippin.stages.train import train

DATA = common.ROOT / "recipes" / "data"
LENGTH, SCORED, STEPS = 256, 16, 24
AFFINE = recipe.Quantize(bits=4, group_size=64, scheme="affine", embed_bits=8)
SYMMETRIC = replace(AFFINE, group_size=32, scheme="symmetric", embed_scheme="symmetric")
WHOLE = replace(AFFINE, embed_bits=4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Nats a token, share of equal likeliest tokens, bits of all weights, CPU-seconds."""

    kl: float
    top1: float
    bits: float
    seconds: float = 0.0


def main() -> None:
    """Make or take the reference, score every method and peer on it, print the rows."""
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--text", type=Path, default=DATA / "shakespeare" / "train.txt")
    parser.add_argument("--reference", type=Path, help="a folder of an earlier run's --keep")
    parser.add_argument("--keep", type=Path, help="where to leave the reference")
    options = parser.parse_args()
    torch.set_num_threads(1)  # waiting threads would count as work on a busy machine
    with tempfile.TemporaryDirectory() as scratch:
        desk = Desk(Path(scratch), options.text)
        reference = options.reference or desk.make_reference()
        if options.keep and not options.reference:
            shutil.copytree(reference, options.keep)
        rows = list(desk.rows(reference))
    common.report(rows, options.save)


class Desk:
    """A folder for everything in between, and the three parts of the text."""

    def __init__(self, folder: Path, text: Path) -> None:
        self.folder, self.name = folder, text.stem
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

    def asked(self, part: str, **tables: Any) -> recipe.Recipe:
        """Text of one part, in samples of LENGTH tokens."""
        data = recipe.Data(source=part, format="text", max_seq_len=LENGTH)
        model = recipe.Model(source="builtin:smollm2", device="cpu")
        return recipe.Recipe(model=model, data=data, folder=self.folder, **tables)

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

    def rows(self, reference: Path) -> Iterator[common.Row]:
        """One row a setting: `best`, beside the other methods and the peers."""
        ruler = Ruler(reference, self.scored)
        for name, settings, methods, peer in (
            ("quant-kl-4.5", AFFINE, tuple(QUANTIZERS), mlx_nearest),
            ("quant-kl-4.5-symmetric", SYMMETRIC, ("best", "rtn"), gguf_q4_0),
            ("quant-kl-all-4.5", WHOLE, ("best", "rtn"), mlx_nearest),
        ):
            scores = {method: self.score(ruler, reference, settings, method) for method in methods}
            others = {f"pippin {m}": s for m, s in scores.items() if m != "best"}
            others[peer_name(peer)] = ruler.peer(peer, settings)
            best = scores["best"]
            yield common.Row(
                name=name,
                value=round(best.kl, 4),
                unit=f"nats a token to bfloat16, {self.name}, {ruler.tokens} tokens",
                better="lower",
                peers={other: round(score.kl, 4) for other, score in others.items()},
                notes={
                    "top-1": {m: round(s.top1, 4) for m, s in (scores | others).items()},
                    "CPU-seconds": {m: round(s.seconds, 1) for m, s in scores.items()},
                    "bits per weight, everything counted": round(best.bits, 3),
                    "perplexity of the reference": round(ruler.perplexity, 2),
                },
            )

    def score(
        self, ruler: "Ruler", reference: Path, settings: recipe.Quantize, method: Any
    ) -> Score:
        """Quantize by one method, then measure."""
        made = self.asked("calibration", quantize=replace(settings, method=method))
        start = time.process_time()
        folder = self.run(quantize, made, reference)
        seconds = time.process_time() - start
        view = DenseView(folder)
        measured = ruler.measure({name: view.read(name) for name in view.tensors})
        return replace(measured, bits=bits_per_weight(folder), seconds=seconds)


class Ruler:
    """The reference's distributions over the scored text; any weights are held against them."""

    def __init__(self, reference: Path, text: str) -> None:
        self.checkpoint, self.config = Checkpoint(reference), read_config(reference)
        self.network = load_engine("torch", "cpu").load(reference, "bfloat16").network
        ids = load_tokenizer(reference).encode(text)
        starts = np.linspace(0, len(ids) - LENGTH, SCORED).astype(int)
        self.rows = torch.tensor([ids[start : start + LENGTH] for start in starts])
        self.tokens = self.rows.numel()
        self.parent = [self.logprobs(row).half() for row in self.rows]
        said = [
            lp[:-1].float().gather(1, row[1:, None]).mean()
            for lp, row in zip(self.parent, self.rows, strict=True)
        ]
        self.perplexity = math.exp(-float(torch.stack(said).mean()))

    @torch.inference_mode()
    def logprobs(self, row: torch.Tensor) -> torch.Tensor:
        """(T, V) float32 of one sequence."""
        return self.network(row[None]).logits[0].float().log_softmax(-1)

    def measure(self, tensors: dict[str, np.ndarray]) -> Score:
        """KL and agreement of the network with these weights."""
        parameters = dict(self.network.named_parameters())
        for name, tensor in tensors.items():
            value = torch.from_numpy(np.asarray(tensor, np.float32))
            parameters[name].data.copy_(value)
        divergence, equal = 0.0, 0
        for row, parent in zip(self.rows, self.parent, strict=True):
            child, parent_TV = self.logprobs(row), parent.float()
            divergence += float((parent_TV.exp() * (parent_TV - child)).sum())
            equal += int((parent_TV.argmax(-1) == child.argmax(-1)).sum())
        return Score(kl=divergence / self.tokens, top1=equal / self.tokens, bits=0.0)

    def peer(self, peer: Callable[..., np.ndarray], settings: recipe.Quantize) -> Score:
        """Every matrix through another program's quantizer and back."""
        tensors = {}
        for name, info in self.checkpoint.tensors.items():
            tensors[name] = self.checkpoint.read(name).astype(np.float32)
            if len(info.shape) == 2:
                embedding = names.is_embedding(names.module(name))
                bits = settings.embed_bits if embedding else settings.bits
                tensors[name] = peer(tensors[name], bits)
        return self.measure(tensors)


def mlx_nearest(weight: np.ndarray, bits: int) -> np.ndarray:
    """MLX's own affine quantizer, groups of 64."""
    import mlx.core as mx

    array = mx.array(weight).astype(mx.bfloat16)
    packed, scales, biases = mx.quantize(array, group_size=64, bits=bits)
    dense = mx.dequantize(packed, scales, biases, group_size=64, bits=bits)
    return np.array(dense.astype(mx.float32))


def gguf_q4_0(weight: np.ndarray, bits: int) -> np.ndarray:
    """GGUF's Q4_0, or Q8_0 for 8 bits: symmetric groups of 32."""
    from gguf import GGMLQuantizationType, quants

    kind = {4: GGMLQuantizationType.Q4_0, 8: GGMLQuantizationType.Q8_0}[bits]
    return quants.dequantize(quants.quantize(weight, kind), kind)


def peer_name(peer: Callable[..., np.ndarray]) -> str:
    """With the version that is installed."""
    package = peer.__name__.partition("_")[0]
    return f"{peer.__name__.replace('_', ' ')}, {package} {metadata.version(package)}"


def dither(source: Path, target: Path) -> None:
    """Move every weight of a matrix by up to half a step of the 4-bit groups of 32 it lies on."""
    checkpoint, rng = Checkpoint(source), np.random.default_rng(0)
    target.mkdir()
    copy_side_files(source, target)
    shutil.copy(source / names.CONFIG, target)
    with Writer(target, checkpoint.tensors) as writer:
        for name, info in checkpoint.tensors.items():
            tensor = checkpoint.read(name)
            if len(info.shape) == 2:
                groups = tensor.astype(np.float32).reshape(info.shape[0], -1, 32)
                step = (groups.max(-1, keepdims=True) - groups.min(-1, keepdims=True)) / 15
                groups += (rng.random(groups.shape, np.float32) - 0.5) * step
                tensor = groups.reshape(info.shape).astype(info.dtype)
            writer.write(name, tensor)


if __name__ == "__main__":
    main()
