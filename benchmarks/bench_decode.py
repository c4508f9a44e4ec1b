"""Decoding one sequence on a CPU: 4-bit linears in the torch engine beside dense ones.

The built-in small model, its linears rounded to 4 bits in groups of 32. Every side decodes the same
weights with one thread in a process of its own; the first tokens' CPU-seconds, in which the prompt
is read, are taken off. llama.cpp takes part where llama-cpp-python is installed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import common
from pippin import recipe
from pippin.targets import Bundle, load_target
from pippin.targets.gguf.llama_cpp import LlamaCppModel, is_installed

FIRST, TOKENS, CONTEXT = 8, 72, 128
LLAMA = "llama.cpp Q4_0"
PROMPT = list(range(100, 140))


def main() -> None:
    """Quantize, decode on every side, print the row."""
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--side", choices=SIDES, help="run one side alone, in this process")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(run_side(options.side, options.folder)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        make_models(Path(scratch))
        present = [side for side in SIDES if side != LLAMA or is_installed()]
        results = {side: in_own_process(side, Path(scratch)) for side in present}
    common.report([row_of(results)], options.save)


def row_of(results: dict[str, dict[str, Any]]) -> common.Row:
    """Speed of the codes, all other sides as peers; whether all said the same."""
    ours, *others = results
    said = {side: result["said"] for side, result in results.items()}
    agree = {s: sum(a == b for a, b in zip(said[ours], said[s], strict=True)) for s in others}
    return common.Row(
        name="decode-int4-cpu",
        value=results[ours]["rate"],
        unit="tokens per CPU-second",
        better="higher",
        peers={side: results[side]["rate"] for side in others},
        notes={f"of {TOKENS} tokens equal to ours": agree},
    )


def make_models(folder: Path) -> None:
    """`codes`, in pippin's layout, and `dense`, the same numbers as a plain checkpoint."""
    from pippin.artifact import Origin
    from pippin.job import Job
    from pippin.model.config import read_raw, without_quantization, write_raw
    from pippin.model.quantized import DenseView
    from pippin.model.source import fetch_into, locate
    from pippin.model.weights import Writer
    from pippin.stages.quantize import quantize

    model = recipe.Model(source="builtin:smollm2")
    (folder / "model").mkdir()
    list(fetch_into(locate(model, folder), model, folder / "model"))
    asked = recipe.Recipe(
        model=model,
        data=recipe.Data(source=""),
        quantize=recipe.Quantize(
            method="rtn", bits=4, group_size=32, scheme="symmetric", embed_group_size=64
        ),
    )
    origin = Origin(stage="quantize", inputs={}, settings={}, versions={})
    job = Job(
        stage="quantize",
        recipe=asked,
        inputs={"model": folder / "model"},
        folder=folder / "codes",
        origin=origin,
    )
    list(quantize(job))
    view = DenseView(folder / "codes")
    (folder / "dense").mkdir()
    write_raw(folder / "dense", without_quantization(read_raw(folder / "codes")))
    with Writer(folder / "dense", view.tensors) as writer:
        for name, spec in view.tensors.items():
            writer.write(name, view.read(name).astype(spec.dtype))
    if is_installed():
        (folder / "gguf").mkdir()
        bundle = Bundle(quantized=folder / "codes", folder=folder / "gguf", context=CONTEXT)
        list(load_target("gguf").write(bundle))


def pippin(folder: Path, dtype: str) -> Callable[[int], list[int]]:
    """The torch engine on the codes."""
    from pippin.engines import Sampling, load_engine

    model = load_engine("torch", "cpu").load(folder / "codes", dtype)

    def decode(count: int) -> list[int]:
        steps = model.generate([np.array(PROMPT, np.int32)], Sampling(max_tokens=count))
        return [int(token or 0) for (token,) in steps]

    return decode


def llama_cpp(folder: Path, dtype: str) -> Callable[[int], list[int]]:
    """llama.cpp on the same codes."""
    from pippin.engines import Sampling

    model = LlamaCppModel(folder / "gguf" / "model.gguf", CONTEXT, n_threads=1, n_threads_batch=1)

    def decode(count: int) -> list[int]:
        steps = model.generate([np.array(PROMPT, np.int32)], Sampling(max_tokens=count))
        return [int(token or 0) for (token,) in steps]

    return decode


def transformers(folder: Path, dtype: str) -> Callable[[int], list[int]]:
    """transformers' own generate on the dense numbers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=dtype)
    prompt = torch.tensor([PROMPT])

    def decode(count: int) -> list[int]:
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        return out[0, len(PROMPT) :].tolist()

    return decode


SIDES = {
    "pippin int4": (pippin, "bfloat16"),
    "transformers bfloat16": (transformers, "bfloat16"),
    "transformers float32": (transformers, "float32"),
    LLAMA: (llama_cpp, ""),
}


def run_side(side: str, folder: Path) -> dict[str, Any]:
    """Tokens a CPU-second after the first ones, and what was said."""
    program, dtype = SIDES[side]
    decode = program(folder, dtype)
    decode(2)
    clocks, said = [time.process_time()], []
    for count in (FIRST, TOKENS):
        said = decode(count)
        clocks.append(time.process_time())
    first, all_ = np.diff(clocks)
    return {"rate": round((TOKENS - FIRST) / float(all_ - first), 1), "said": said}


def in_own_process(side: str, folder: Path) -> dict[str, Any]:
    """The result of one side, with one thread."""
    command = [sys.executable, __file__, "--side", side, "--folder", str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
