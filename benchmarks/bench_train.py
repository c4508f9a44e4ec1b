"""LoRA training on a CPU: pippin beside transformers' Trainer with peft, on the same samples.

Question -> SQL rows and the built-in small model. Both sides take the same samples in the same
updates with the same first adapter; each side runs in a process of its own with as many threads, so
CPU-seconds compare. Trainer pads its batches, pippin packs them and computes what samples of an
update begin with in common once; only real tokens count, each as often as it stands in the data.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import common
from pippin import recipe
from pippin.data.batches import Sample, lay_out, without_unread
from pippin.data.beginnings import share_beginnings
from pippin.engines import Weights, load_engine

LORA = recipe.Lora(rank=16, alpha=32.0, targets=("all-linear",))
DATA = recipe.Data(source="recipes/data/sql", chat_template=False, max_seq_len=128)
RATE, ROWS, STEPS, WARM = 2e-4, 4, 14, 2
SIDES = {
    "pippin bfloat16": ("pippin", "bfloat16"),
    "pippin float32": ("pippin", "float32"),
    "Trainer + peft bfloat16": ("trainer", "bfloat16"),
    "Trainer + peft float32": ("trainer", "float32"),
}


def main() -> None:
    """Run every side in its own process, then print the rows."""
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--side", choices=SIDES, help="run one side alone, in this process")
    parser.add_argument("--threads", type=int, default=1, help="of every side")
    parser.add_argument("--shuffled", action="store_true", help="samples in random order")
    parser.add_argument("--model", type=Path, help="model folder; the built-in one by default")
    options = parser.parse_args()
    if options.side:
        print(json.dumps(run_side(options.side, options.model, options.shuffled)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or fetch(Path(scratch))
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
        results = {side: in_own_process(side, folder, options.shuffled) for side in SIDES}
    rows = rows_of(results)
    if options.shuffled or options.threads > 1:  # memory is that of one thread in the file's order
        order = "-shuffled" if options.shuffled else ""
        threads = f"-{options.threads}-threads" if options.threads > 1 else ""
        rows = [replace(rows[0], name=f"lora-cpu-sql{order}{threads}")]
    common.report(rows, options.save)


def rows_of(results: dict[str, dict[str, Any]]) -> list[common.Row]:
    """Speed and memory of pippin in bfloat16, with all other sides as peers."""
    ours, *others = results
    best = results[ours]
    speeds = {side: results[side]["tokens"] / results[side]["cpu_s"] for side in results}
    limit = best["gemm_flops"] / (best["flops"] / best["tokens"])
    exact = [results[side]["losses"] for side in ("pippin float32", "Trainer + peft float32")]
    return [
        common.Row(
            name="lora-cpu-sql",
            value=round(speeds[ours], 1),
            unit="real tokens per CPU-second",
            better="higher",
            limit=round(limit, 1),
            share_of_limit=round(speeds[ours] / limit, 3),
            peers={side: round(speeds[side], 1) for side in others},
            spread=round(best["spread"], 3),
            notes={
                "largest difference of a float32 loss": float(np.abs(np.subtract(*exact)).max()),
                "matmul GFLOP/s": round(best["gemm_flops"] / 1e9, 1),
                "share of the tokens that were computed for another sample": best["shared"],
                "samples a step": ROWS,
                "steps": STEPS - WARM,
            },
        ),
        common.Row(
            name="lora-cpu-sql-memory",
            value=round(best["peak"] / 2**20),
            unit="MiB, peak resident set of the process",
            better="lower",
            peers={side: round(results[side]["peak"] / 2**20) for side in others},
        ),
    ]


def fetch(folder: Path) -> Path:
    """The built-in model as a Hugging Face folder."""
    from pippin.model.source import fetch_into, locate

    model = recipe.Model(source="builtin:smollm2")
    list(fetch_into(locate(model, folder), model, folder))
    return folder


def in_own_process(side: str, folder: Path, shuffled: bool) -> dict[str, Any]:
    """One side; its figures are the last line it prints."""
    command = [sys.executable, __file__, "--side", side, "--model", str(folder)]
    command += ["--shuffled"] if shuffled else []
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def run_side(side: str, folder: Path, shuffled: bool) -> dict[str, Any]:
    """Tokens, CPU-seconds, peak bytes and losses of one side."""
    program, dtype = SIDES[side]
    steps = samples_by_step(folder, shuffled)
    weights = first_adapter(folder)
    run: Callable[..., tuple[list[float], list[float]]] = {"pippin": pippin, "trainer": trainer}[
        program
    ]
    losses, clocks = run(folder, dtype, steps, weights)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    counts = [sum(len(s.tokens) for s in step) for step in steps]
    spent, counted = np.diff(clocks)[WARM - 1 :], counts[WARM:]
    rates = np.divide(counted, spent)
    read, once = computed(steps[WARM:])
    return {
        "tokens": sum(counted),
        "cpu_s": float(spent.sum()),
        "spread": float(rates.std() / rates.mean()),
        "peak": peak,
        "losses": losses,
        "shared": round((read - once) / sum(counted), 3),
        "flops": flops(folder, steps[WARM:]),
        "gemm_flops": gemm_flops(dtype),
    }


def samples_by_step(folder: Path, shuffled: bool) -> list[list[Sample]]:
    """The first samples of the training split in the file's order or another, ROWS a step."""
    from pippin.data.chat import tokenize
    from pippin.data.dataset import load_split
    from pippin.model.tokenizer import load_tokenizer

    rows = load_split(DATA, common.ROOT, "train")
    if shuffled:
        rows = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    samples = tokenize(rows[: ROWS * STEPS], load_tokenizer(folder), DATA).samples
    return [list(samples[i : i + ROWS]) for i in range(0, len(samples), ROWS)]


def computed(steps: list[list[Sample]]) -> tuple[int, int]:
    """Tokens that any loss reads, and how many those are where a shared beginning counts once."""
    read = [without_unread(lay_out([step], sum(len(s.tokens) for s in step))) for step in steps]
    once = [share_beginnings(batch) for batch in read]
    return sum(b.real_tokens for b in read), sum(b.real_tokens for b in once)


def first_adapter(folder: Path) -> Weights:
    """The pairs both sides start from."""
    from pippin.model.adapter import adapted_linears, new_adapter
    from pippin.model.weights import Checkpoint

    return new_adapter(adapted_linears(Checkpoint(folder), LORA), LORA, seed=0)


def pippin(
    folder: Path, dtype: str, steps: list[list[Sample]], weights: Weights
) -> tuple[list[float], list[float]]:
    """Mean losses, and the process's clock after every step."""
    train = recipe.Train(learning_rate=RATE)
    trained = load_engine("torch", "cpu").load(folder, dtype).trainer(train, LORA, weights, seed=0)
    losses, clocks = [], []
    for step in steps:
        batch = lay_out([step], sum(len(s.tokens) for s in step))
        result = trained.step([batch], RATE)
        losses.append(result.loss_sum / result.tokens)
        clocks.append(time.process_time())
    return losses, clocks


def trainer(
    folder: Path, dtype: str, steps: list[list[Sample]], weights: Weights
) -> tuple[list[float], list[float]]:
    """The same through transformers' Trainer, peft's layers and batches padded on the right."""
    import transformers

    clocks: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clocks.append(time.process_time())

    with tempfile.TemporaryDirectory() as scratch:
        settings = transformers.TrainingArguments(
            output_dir=scratch,
            per_device_train_batch_size=ROWS,
            max_steps=len(steps),
            learning_rate=RATE,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            logging_steps=1,
            logging_strategy="steps",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            use_cpu=True,
            train_sampling_strategy="sequential",
        )
        run = transformers.Trainer(
            model=peft_model(folder, dtype, weights),
            args=settings,
            data_collator=pad,
            train_dataset=[sample for step in steps for sample in step],
            callbacks=[Clock()],
        )
        run.remove_callback(transformers.PrinterCallback)
        run.train()
    return [row["loss"] for row in run.state.log_history if "loss" in row], clocks


def peft_model(folder: Path, dtype: str, weights: Weights) -> Any:
    """peft on the model in `dtype`, its pairs in float32 as peft keeps them."""
    import peft
    import torch
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    names = sorted({key.split(".lora_")[0].rpartition(".")[2] for key in weights})
    settings = peft.LoraConfig(
        r=LORA.rank, lora_alpha=LORA.alpha, target_modules=names, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(base, settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                key = name.removeprefix("base_model.model.").replace(".default.", ".")
                parameter.copy_(torch.from_numpy(weights[key]))
    return model


def pad(samples: list[Sample]) -> dict[str, Any]:
    """A batch padded to its longest sample, what is not scored out of the labels."""
    import torch

    width = max(len(s.tokens) for s in samples)
    tokens = torch.zeros(len(samples), width, dtype=torch.int64)
    labels, mask = torch.full_like(tokens, -100), torch.zeros_like(tokens)
    for row, sample in enumerate(samples):
        length = len(sample.tokens)
        tokens[row, :length] = torch.from_numpy(sample.tokens).long()
        mask[row, :length] = 1
        wanted = np.where(sample.scored, sample.tokens, -100)
        labels[row, :length] = torch.from_numpy(wanted).long()
    return {"input_ids": tokens, "labels": labels, "attention_mask": mask}


def flops(folder: Path, steps: list[list[Sample]]) -> float:
    """Matrix products that nobody can leave out: forward and input gradient, 4 a frozen weight.

    Every linear for every token that is read, a shared beginning's once; the head for scored
    tokens; the adapter forward and backward, 6 a weight. Attention, about 1 % here, is left out.
    """
    from pippin.model.adapter import adapted_linears
    from pippin.model.config import read_config
    from pippin.model.weights import Checkpoint

    config = read_config(folder)
    linears = adapted_linears(Checkpoint(folder), LORA).values()
    dense = sum(inputs * outputs for inputs, outputs in linears)
    low = sum(LORA.rank * (inputs + outputs) for inputs, outputs in linears)
    samples = [sample for step in steps for sample in step]
    tokens = computed(steps)[1]
    scored = sum(int(s.scored.sum()) for s in samples)
    return (
        tokens * (4.0 * dense + 6.0 * low) + scored * 4.0 * config.vocab_size * config.hidden_size
    )


def gemm_flops(dtype: str) -> float:
    """Operations per CPU-second of a large matrix product, the best of five, in this process."""
    import torch

    size = 1024
    a, b = (torch.randn(size, size).to(getattr(torch, dtype)) for _ in range(2))
    times = []
    for _ in range(6):
        start = time.process_time()
        for _ in range(4):
            a @ b
        times.append((time.process_time() - start) / 4)
    return 2.0 * size**3 / min(times[1:])


if __name__ == "__main__":
    main()
