"""Seconds to make each deployed file of the built-in model, its size, and how fast it answers here.

Every file is made from one quantized folder (4-bit symmetric in groups of 32 with searched scales,
the embedding 8-bit per channel), which this script makes unless `--quantized` gives one; `--model`
says which model that is, where it is not the built-in one. The seconds include the target's own
check, whose figures are in the notes of the row `top1-`; `written` in the notes is when the file
stood, `cpu` the seconds of CPU time. Tokens a second of CPU time are those of the deployed file's
scorer: for `gguf` that is llama.cpp where llama-cpp-python is installed, else PyTorch over the
file's tensors. There, ExecuTorch's decoding is compared with llama.cpp's Q4_0 of the same codes,
one thread each.
"""

import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

import common
from pippin import recipe
from pippin.artifact import Origin
from pippin.engines import Sampling, Scorer
from pippin.events import Progress
from pippin.job import Job
from pippin.model.tokenizer import load_tokenizer
from pippin.recipe import DEVICE_ONLY
from pippin.stages.fetch import fetch
from pippin.stages.quantize import quantize
from pippin.stages.shipped import bundle_bytes
from pippin.targets import TARGETS, Bundle, load_target
from pippin.targets.bundle import DESCRIPTION
from pippin.targets.gguf.llama_cpp import LlamaCppModel, is_installed

CONTEXT, TOKENS = 512, 32
# What rows call a target.
NAMES = {"executorch": "pte", "executorch-mlx": "mlx-delegate"}
PROMPT = "The capital of France is"
GRID = recipe.Quantize(
    method="mse",
    bits=4,
    group_size=32,
    scheme="symmetric",
    embed_group_size=0,
    embed_scheme="symmetric",
)
# Of a check, in the notes.
FIGURES = (
    "prompts",
    "of_prompts",
    "mean_kl",
    "greedy_equal",
    "greedy_tokens",
    "max_difference",
    "tokens",
    "layers",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """What making one bundle took: seconds in all and to the written file, of CPU, peak bytes."""

    wall: float
    cpu: float
    written: float
    peak: int


def main() -> None:
    """Print the rows of the asked targets."""
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--quantized", type=Path, help="a quantized folder that is there already")
    parser.add_argument("--model", help="what the quantized folder is, for the rows' names")
    parser.add_argument("--target", choices=TARGETS, action="append", help="only these")
    parser.add_argument("--gate-prompts", type=int, default=32, help="what a check takes")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        quantized = asked.quantized or make_quantized(Path(place))
        rows = [
            row
            for target in asked.target or TARGETS
            for row in measure(target, quantized, Path(place) / target, asked.gate_prompts)
        ]
    of_model = f"-{asked.model}" if asked.model else ""
    common.report([replace(row, name=row.name + of_model) for row in rows], asked.save)


def measure(target: str, quantized: Path, folder: Path, gate_prompts: int) -> list[common.Row]:
    """Seconds, memory, megabytes, agreement and tokens a second of one target."""
    folder.mkdir()
    name = NAMES.get(target, target)
    # A process of its own: its peak is this export's.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        made = pool.submit(make, target, quantized, folder, gate_prompts).result()
    size, notes = bundle_bytes(folder) / 1e6, {"cpu": made.cpu, "written": made.written}
    rows = [
        _row(f"export-{name}-seconds", made.wall, "s", notes=notes),
        _row(f"export-{name}-memory", made.peak / 1e9, "GB"),
        _row(f"export-{name}-megabytes", size, "MB"),
        *_agreement(name, json.loads((folder / DESCRIPTION).read_text())),
    ]
    if target in DEVICE_ONLY:
        return rows
    start = time.perf_counter()
    scorer = load_target(target).load(folder)
    loaded = time.perf_counter() - start
    rows.append(_row(f"load-{name}-seconds", loaded, "s"))
    return [*rows, *_decode(target, scorer, quantized, folder)]


def make(target: str, quantized: Path, folder: Path, gate_prompts: int) -> Made:
    """Make a bundle, its check included."""
    start, cpu, written = time.perf_counter(), time.process_time(), 0.0
    for event in load_target(target).write(
        Bundle(quantized=quantized, folder=folder, context=CONTEXT, gate_prompts=gate_prompts)
    ):
        if isinstance(event, Progress) and not written and list(folder.glob("model.*")):
            written = round(time.perf_counter() - start, 1)
    return Made(
        wall=time.perf_counter() - start,
        cpu=round(time.process_time() - cpu, 1),
        written=written,
        peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


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


def _agreement(name: str, description: dict[str, Any]) -> Iterator[common.Row]:
    """The check's figures, where something here ran the file."""
    check = description["check"]
    if "top1" not in check:
        return
    notes = {key: check[key] for key in FIGURES if key in check}
    notes["runtime"] = description["runtime"]
    yield _row(f"top1-{name}", check["top1"], "of likeliest tokens", "higher", notes=notes)


def _decode(target: str, scorer: Scorer, quantized: Path, folder: Path) -> list[common.Row]:
    """Tokens a second of CPU time, which others on the machine do not change."""
    speed = _speed(scorer, quantized)
    if target != "executorch":
        name = f"decode-{NAMES.get(target, target)}-cpu"
        return [_row(name, speed, "tokens/s of CPU", "higher")]
    peers = {"transformers, eager, bfloat16": round(_peer_speed(quantized), 2)}
    rows = [_row("decode-pte-int4-cpu", speed, "tokens/s of CPU", "higher", peers=peers)]
    if is_installed():
        theirs = _llama_speed(quantized, folder.with_name("llama.cpp"))
        notes = {"ours": round(speed, 1), "llama.cpp Q4_0": round(theirs, 1)}
        unit = "of llama.cpp's tokens a second of CPU"
        rows.append(_row("decode-llama-cpp-ratio", speed / theirs, unit, "higher", notes=notes))
    return rows


def _llama_speed(quantized: Path, folder: Path) -> float:
    folder.mkdir()
    bundle = Bundle(quantized=quantized, folder=folder, context=CONTEXT, gate_prompts=1)
    list(load_target("gguf").write(bundle))
    model = LlamaCppModel(folder / "model.gguf", CONTEXT, n_threads=1, n_threads_batch=1)
    return _speed(model, quantized)


def _speed(scorer: Scorer, quantized: Path) -> float:
    prompt_T = np.array(load_tokenizer(quantized).encode(PROMPT), np.int32)
    steps = scorer.generate([prompt_T], Sampling(max_tokens=TOKENS))
    next(steps)
    start = time.process_time()
    count = sum(1 for _ in steps)
    return count / (time.process_time() - start)


def _peer_speed(quantized: Path) -> float:
    """transformers' eager decoding of the same shape; what the weights are, costs nothing."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(quantized)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    ids_BT = torch.tensor([load_tokenizer(quantized).encode(PROMPT)])
    with torch.no_grad():
        out = model(ids_BT, use_cache=True)
        start = time.process_time()
        for _ in range(TOKENS):
            ids_BT = out.logits[:, -1:].argmax(-1)
            out = model(ids_BT, past_key_values=out.past_key_values, use_cache=True)
    return TOKENS / (time.process_time() - start)


def _row(
    name: str, value: float, unit: str, better: Literal["higher", "lower"] = "lower", **more: Any
) -> common.Row:
    return common.Row(
        name=name,
        value=round(value, 4 if name.startswith("top1") else 2),
        unit=unit,
        better=better,
        **more,
    )


if __name__ == "__main__":
    main()
