"""Seconds to make each deployed file of the built-in model, its size, and how fast it answers here.

Every file is made from one quantized folder (4-bit symmetric in groups of 32, the embedding 8-bit
per channel), which this script makes by rounding to nearest unless `--quantized` gives one. The
seconds include the target's own check. Tokens a second are those of the deployed file's scorer:
for `gguf` that is PyTorch over the file's tensors, not llama.cpp.
"""

import tempfile
import time
from pathlib import Path

import numpy as np

import common
from pippin import recipe
from pippin.artifact import Origin
from pippin.engines import Sampling, Scorer
from pippin.job import Job
from pippin.model.tokenizer import load_tokenizer
from pippin.stages.fetch import fetch
from pippin.stages.quantize import quantize
from pippin.stages.shipped import bundle_bytes
from pippin.targets import TARGETS, Bundle, load_target

CONTEXT, TOKENS = 512, 32
PROMPT = "The capital of France is"
GRID = recipe.Quantize(
    bits=4, group_size=32, scheme="symmetric", embed_group_size=0, embed_scheme="symmetric"
)


def main() -> None:
    """Print the rows of the asked targets."""
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--quantized", type=Path, help="a quantized folder that is there already")
    parser.add_argument("--target", choices=TARGETS, action="append", help="only these")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        quantized = asked.quantized or make_quantized(Path(place))
        rows = [
            row
            for target in asked.target or TARGETS
            for row in measure(target, quantized, Path(place) / target)
        ]
    common.report(rows, asked.save)


def measure(target: str, quantized: Path, folder: Path) -> list[common.Row]:
    """Seconds, megabytes and tokens a second of one target."""
    folder.mkdir()
    start = time.perf_counter()
    for _ in load_target(target).write(Bundle(quantized=quantized, folder=folder, context=CONTEXT)):
        pass
    made = time.perf_counter() - start
    start = time.perf_counter()
    scorer = load_target(target).load(folder)
    loaded = time.perf_counter() - start
    return [
        _row(f"export-{target}-seconds", made, "s", "lower"),
        _row(f"export-{target}-megabytes", bundle_bytes(folder) / 1e6, "MB", "lower"),
        _row(f"load-{target}-seconds", loaded, "s", "lower"),
        _row(f"decode-{target}-cpu", _speed(scorer, quantized), "tokens/s", "higher"),
    ]


def make_quantized(folder: Path) -> Path:
    """The built-in model, fetched and quantized under `folder`."""
    asked = recipe.Recipe(
        model=recipe.Model(source="builtin:smollm2"), data=recipe.Data(source="-"), quantize=GRID
    )
    for stage, function, inputs in (
        ("fetch", fetch, {}),
        ("quantize", quantize, {"model": folder / "fetch"}),
    ):
        origin = Origin(stage=stage, inputs={}, settings={}, versions={})
        job = Job(stage=stage, recipe=asked, inputs=inputs, folder=folder / stage, origin=origin)
        for _ in function(job):
            pass
    return folder / "quantize"


def _speed(scorer: Scorer, quantized: Path) -> float:
    prompt_T = np.array(load_tokenizer(quantized).encode(PROMPT), np.int32)
    steps = scorer.generate([prompt_T], Sampling(max_tokens=TOKENS))
    next(steps)
    start = time.perf_counter()
    count = sum(1 for _ in steps)
    return count / (time.perf_counter() - start)


def _row(name: str, value: float, unit: str, better: str) -> common.Row:
    return common.Row(name=name, value=round(value, 2), unit=unit, better=better)


if __name__ == "__main__":
    main()
