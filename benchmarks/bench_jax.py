"""The JAX engine on a CPU: compiling a step, training beside torch, codes too, decoding beside HF.

Every side runs in a process of its own on one core, so CPU-seconds compare. Training takes packed
rows of 512 tokens in eight samples; decoding is greedy, one row, after a prompt of 40 tokens.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import common
from bench_decode import make_models
from pippin import recipe
from pippin.data.batches import Sample, lay_out
from pippin.engines import Sampling, load_engine

LORA = recipe.Lora(rank=16, alpha=32.0, targets=("all-linear",))
ROW, SAMPLES, STEPS, WARM = 512, 8, 6, 2
PROMPT, TOKENS, LEFT_OUT = 40, 48, 16
# OpenLLaMA-3B's shape, LoRA on q and v, a row of 4,096 tokens: the size a step is compiled for.
LAYERS, HIDDEN, FFN, HEADS, VOCAB, COMPILED_ROW = 26, 3200, 8640, 32, 32000, 4096


def main() -> None:
    """Run every side in its own process, then print the rows."""
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--side", choices=SIDES, help="run one side alone, in this process")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        print(json.dumps(SIDES[options.side](options.folder)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        make_models(Path(scratch))
        results = {side: in_own_process(side, Path(scratch)) for side in SIDES}
    common.report(rows_of(results), options.save)


def rows_of(results: dict[str, dict[str, Any]]) -> list[common.Row]:
    """One row a figure that the engine is held to."""
    jax, torch = results["train jax"], results["train torch"]
    compiled = results["compile"]
    ours, theirs = results["decode jax"], results["decode transformers"]
    return [
        common.Row(
            name="jax-compile-seconds",
            value=round(compiled["seconds"], 2),
            unit="seconds to trace and compile a LoRA step of 26 layers",
            better="lower",
            limit=20.0,
            share_of_limit=round(compiled["seconds"] / 20.0, 3),
            notes={"CPU-seconds": round(compiled["cpu_s"], 2)},
        ),
        common.Row(
            name="jax-cpu-over-torch",
            value=round(jax["cpu_s"] / torch["cpu_s"], 3),
            unit="CPU-seconds of a float32 LoRA step over the torch engine's",
            better="lower",
            limit=1.5,
            peers={"torch engine, seconds": round(torch["cpu_s"], 3)},
            spread=round(jax["spread"], 3),
            notes={
                "jax, seconds": round(jax["cpu_s"], 3),
                "largest difference of a loss": max(
                    abs(a - b) for a, b in zip(jax["losses"], torch["losses"], strict=True)
                ),
                "peak MiB": {"jax": jax["peak"] >> 20, "torch": torch["peak"] >> 20},
            },
        ),
        common.Row(
            name="jax-decode-cpu",
            value=round(ours["rate"], 2),
            unit="tokens per CPU-second, float32, one row",
            better="higher",
            peers={"transformers eager": round(theirs["rate"], 2)},
            notes={"same tokens": ours["tokens"] == theirs["tokens"]},
        ),
        codes_row(results),
    ]


def codes_row(results: dict[str, dict[str, Any]]) -> common.Row:
    """Training an adapter over 4-bit codes, beside the same weights dequantized beforehand."""
    codes, dense, torch = (results[f"train {x}"] for x in ("codes", "dense", "codes in torch"))
    return common.Row(
        name="jax-codes-memory",
        value=codes["peak"] >> 20,
        unit="MiB, peak of the process, float32 LoRA step over 4-bit layers",
        better="lower",
        peers={"over dense weights": dense["peak"] >> 20, "torch engine": torch["peak"] >> 20},
        notes={
            "CPU-seconds a step": {
                name: round(result["cpu_s"], 2)
                for name, result in results.items()
                if name.startswith("train")
            },
            "largest difference of a loss to torch": max(
                abs(a - b) for a, b in zip(codes["losses"], torch["losses"], strict=True)
            ),
        },
    )


def in_own_process(side: str, folder: Path) -> dict[str, Any]:
    """Its figures are the last line it prints."""
    command = [sys.executable, __file__, "--side", side, "--folder", str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def train(name: str, folder: Path) -> dict[str, Any]:
    """CPU-seconds of a step after the first ones, and the losses."""
    from pippin.model.adapter import adapted_linears, new_adapter
    from pippin.model.weights import Checkpoint

    engine, rng = load_engine(name, "cpu"), np.random.default_rng(0)
    weights = new_adapter(adapted_linears(Checkpoint(folder), LORA), LORA, seed=0)
    settings = recipe.Train(row_tokens=ROW)
    trainer = engine.load(folder, "float32").trainer(settings, LORA, weights, 0)
    length, losses, clocks = ROW // SAMPLES, [], []
    for _ in range(STEPS):
        drawn = rng.integers(3, 49000, (SAMPLES, length)).astype(np.int32)
        scored = np.arange(length) > 0
        batch = lay_out([[Sample(tokens=t, scored=scored, row=0) for t in drawn]], ROW)
        clocks.append(time.process_time())
        result = trainer.step([batch], 1e-4)
        losses.append(result.loss_sum / result.tokens)
    spent = np.diff([*clocks, time.process_time()])[WARM:]
    return {
        "cpu_s": float(spent.mean()),
        "spread": float(spent.std() / spent.mean()),
        "losses": losses,
        "peak": engine.peak_memory(),
    }


def decode_jax(folder: Path) -> dict[str, Any]:
    """Greedy tokens a CPU-second, compilation and prompt left out."""
    model = load_engine("jax", "cpu").load(folder / "model", "float32")
    sampling = Sampling(max_tokens=TOKENS)
    list(model.generate([prompt()], sampling))
    tokens, clocks = [], []
    for step in model.generate([prompt()], sampling):
        tokens.append(step[0])
        clocks.append(time.process_time())
    return {"rate": (TOKENS - LEFT_OUT) / (clocks[-1] - clocks[LEFT_OUT - 1]), "tokens": tokens}


def decode_transformers(folder: Path) -> dict[str, Any]:
    """The same by transformers with its own cache."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    network = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokens, cache, clocks = [], None, []
    read = torch.from_numpy(prompt()[None]).long()
    with torch.inference_mode():
        for _ in range(TOKENS):
            out = network(input_ids=read, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, read = out.past_key_values, out.logits[:, -1].argmax(-1)[:, None]
            tokens.append(int(read))
            clocks.append(time.process_time())
    return {"rate": (TOKENS - LEFT_OUT) / (clocks[-1] - clocks[LEFT_OUT - 1]), "tokens": tokens}


def prompt() -> np.ndarray:
    """The same random tokens for both."""
    return np.random.default_rng(1).integers(3, 49000, PROMPT).astype(np.int32)


def compile_step(_: Path) -> dict[str, Any]:
    """Seconds to trace and compile for shapes alone: no array of that size is made."""
    from dataclasses import replace

    import jax

    from pippin.engines.jax import trainer
    from pippin.engines.jax.decoder import How
    from pippin.engines.jax.fuji import fuji_spec
    from pippin.engines.jax.load import top_shapes
    from pippin.engines.jax.loss import chunk_size
    from pippin.engines.jax.optimizer import Adam, Masters

    small = fuji_spec("7B")
    spec = replace(
        small,
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        vocab_size=VOCAB,
        head_dim=HIDDEN // HEADS,
        windows=small.windows[:LAYERS],
        rope_of=small.rope_of[:LAYERS],
        ropes=(
            replace(small.ropes[0], frequencies=small.ropes[0].frequencies[: HIDDEN // HEADS // 2]),
        ),
        tied=False,
    )
    adam = Adam.of(recipe.Train())
    rule = trainer.Rule(spec=spec, how=How(), adam=adam, full=False, dtype="bfloat16")

    def shaped(shape: tuple[int, ...], dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    layers = {n: shaped((LAYERS, *s)) for n, s in spec.shapes().items()}
    params = {**{n: shaped(s) for n, s in top_shapes(spec).items()}, "layers": layers}
    sides = {
        "A": shaped((LAYERS, 8, HIDDEN), "float32"),
        "B": shaped((LAYERS, HIDDEN, 8), "float32"),
    }
    pairs = {f"self_attn.{part}_proj": dict(sides) for part in "qv"}
    masters = Masters(pairs, jax.eval_shape(adam.rule().init, pairs))
    frozen = trainer.Frozen(params, {name: shaped((LAYERS,), "float32") for name in pairs})
    positions = -(-COMPILED_ROW // chunk_size(spec)) * chunk_size(spec)
    arrays = {n: shaped((1, 1, COMPILED_ROW), "int32") for n in ("tokens", "positions", "segments")}
    arrays |= {n: shaped((1, positions), "int32") for n in ("index", "targets")}
    arrays["count"] = shaped((1,), "int32")
    figures = shaped((), "float32"), shaped((), "float32"), shaped((), "int32")
    start, clock = time.perf_counter(), time.process_time()
    trainer.train_step.lower(rule, masters, frozen, arrays, jax.random.key(0), *figures).compile()
    return {"seconds": time.perf_counter() - start, "cpu_s": time.process_time() - clock}


SIDES = {
    "train jax": lambda folder: train("jax", folder / "model"),
    "train torch": lambda folder: train("torch", folder / "model"),
    "train codes": lambda folder: train("jax", folder / "codes"),
    "train dense": lambda folder: train("jax", folder / "dense"),
    "train codes in torch": lambda folder: train("torch", folder / "codes"),
    "decode jax": decode_jax,
    "decode transformers": decode_transformers,
    "compile": compile_step,
}


if __name__ == "__main__":
    main()
