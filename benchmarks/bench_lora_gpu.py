"""LoRA training on one CUDA device: pippin beside transformers' Trainer with peft, random weights.

The shape is OpenLLaMA-3B-v2's, Qwen2.5-7B's for w3; 4,096 samples have log-normal lengths of mean
216, from 24 to 1,024 tokens. pippin packs them into rows, Trainer pads batches of 4; only real
tokens count. In a steady step of ours no operator makes the host wait: it would be an error.
"""

import argparse
import contextlib
import tempfile
import time
from collections.abc import Generator
from functools import partial
from typing import Any

import numpy as np

import common
from gpu_common import (
    RATE,
    Run,
    adapter_of,
    describe,
    device,
    matmul_flops,
    release,
    samples,
    seconds_per_token,
    shape_of,
    speed_row,
)
from pippin import recipe
from pippin.data.batches import Batch, BatchPlan, Sample

WARM, STEPS, PEER_STEPS = 3, 20, 24


def main() -> None:
    """Measure the ceiling, every configuration and the peer, then print the rows."""
    parser = common.arguments(__doc__ or "")
    parser.add_argument(
        "--only", default="w1-bf16,w2-bf16", help="of w1, w1r16, w2, w3 and bf16, fp8"
    )
    parser.add_argument("--tokens", default="16384", help="tokens a step, comma-separated")
    parser.add_argument("--peer", action="store_true", help="run Trainer + peft as well")
    parser.add_argument("--profile", action="store_true", help="print where a step's time goes")
    options = parser.parse_args()
    ceilings = {"bf16": matmul_flops("bf16"), "fp8": matmul_flops("fp8")}
    print("ceilings", {k: f"{v / 1e12:.0f} TFLOP/s" for k, v in ceilings.items()}, flush=True)
    rows = []
    for name in options.only.split(","):
        peers = {"Trainer + peft, batch 4": round(trainer(name).speed)} if options.peer else {}
        runs = {}
        for tokens in map(int, options.tokens.split(",")):
            runs[tokens] = pippin(name, tokens, options)
            print(name, tokens, describe(runs[tokens]), flush=True)
        rows.append(row_of(name, runs, peers, ceilings))
    common.report(rows, options.save, device())


def row_of(
    name: str, runs: dict[int, Run], peers: dict[str, float], ceilings: dict[str, float]
) -> common.Row:
    """The fastest packing, with the others in the notes."""
    tokens = max(runs, key=lambda t: runs[t].speed)
    best = runs[tokens]
    notes = {
        "tokens a step": tokens,
        "first gradient norm": round(best.grad_norm, 4),
        "graphs compiled": best.compiled,
        "matmul TFLOP/s": {kind: round(rate / 1e12) for kind, rate in ceilings.items()},
        "other packings": {str(t): round(run.speed) for t, run in runs.items() if t != tokens},
    }
    return speed_row(f"lora-{name}", best, 1.0 / seconds_per_token(name, ceilings), peers, notes)


def network(name: str) -> Any:
    """Random bfloat16 weights, made on the device."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    config, kind = LlamaConfig, LlamaForCausalLM
    if name.startswith("w3"):
        config, kind = Qwen2Config, Qwen2ForCausalLM
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        made = kind(config(**shape_of(name), dtype="bfloat16"))
    torch.set_default_dtype(torch.float32)
    return made


def first_adapter(made: Any, lora: recipe.Lora) -> dict[str, Any]:
    """By checkpoint name, for the linears that `lora` names."""
    from pippin.model.adapter import new_adapter

    wanted = {} if lora.targets == ("all-linear",) else set(lora.targets)
    linears = {
        name: (module.in_features, module.out_features)
        for name, module in made.model.named_modules(prefix="model")
        if hasattr(module, "in_features") and (not wanted or name.rpartition(".")[2] in wanted)
    }
    return new_adapter(linears, lora, seed=0)


def start(name: str, tokens: int) -> tuple[Any, BatchPlan]:
    """Our trainer and our packing, `tokens` in one row a step."""
    from pippin.engines.torch.names import lora_parameters
    from pippin.engines.torch.trainer import TorchTrainer

    made, lora = network(name), adapter_of(name)
    frozen: Any = "float8" if name.endswith("fp8") else "auto"
    train = recipe.Train(row_tokens=tokens, learning_rate=RATE, frozen_dtype=frozen)
    began = time.perf_counter()
    parameters = lora_parameters(made, lora, first_adapter(made, lora))
    trained = TorchTrainer(made, parameters, train, 0)
    print(f"ready after {time.perf_counter() - began:.0f} s", flush=True)
    return trained, BatchPlan(samples(), train, seed=0)


def pippin(name: str, tokens: int, options: argparse.Namespace) -> Run:
    """Steps of our trainer, the first ones left out."""
    import torch

    from pippin.engines.torch.compiled import graphs

    before = graphs()
    trained, plan = start(name, tokens)
    torch.cuda.reset_peak_memory_stats()
    results, clocks, counts, compiled = [], [], [], 0
    for step in range(WARM + STEPS):
        batches = plan.batches(step)
        with without_waiting(wanted=step >= WARM):
            results.append(trained.step(batches, RATE, partial(plan.batches, step + 1)))
        clocks.append(time.perf_counter())
        counts.append(sum(batch.real_tokens for batch in batches))
        compiled = graphs() if step < WARM else compiled
    assert graphs() == compiled, "layers were compiled again after warm-up"
    if options.profile:
        profile(trained, plan.batches(1))
    run = Run(
        speeds=list(np.divide(counts, np.diff(clocks, prepend=0.0))[WARM:]),
        peak=torch.cuda.max_memory_allocated(),
        loss=results[0].loss_sum / results[0].tokens,
        grad_norm=results[0].grad_norm,
        compiled=compiled - before,
        notices=trained.notices,
    )
    del trained
    release()
    return run


@contextlib.contextmanager
def without_waiting(*, wanted: bool) -> Generator[None]:
    """An operator inside that makes the host wait for the device raises an error."""
    import torch

    torch.cuda.set_sync_debug_mode("error" if wanted else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def profile(trained: Any, batches: list[Batch]) -> None:
    """The kernels of one step by the time they take."""
    import torch

    kinds = [torch.profiler.ProfilerActivity.CUDA]  # watching the host as well would slow it
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=kinds) as seen:
        start = time.perf_counter()
        for _ in range(2):
            trained.step(batches, RATE)
        whole = time.perf_counter() - start
    kernels = [e for e in seen.key_averages() if e.device_type.name == "CUDA"]
    kernels.sort(key=lambda e: -e.self_device_time_total)
    busy = sum(e.self_device_time_total for e in kernels)
    print(f"two steps: {whole * 1e3:.0f} ms on the clock, {busy / 1e3:.0f} ms of kernels")
    for e in kernels[:30]:
        print(f"{e.self_device_time_total / 2e3:8.2f} ms {e.count // 2:5d}x {e.key[:110]}")


def trainer(name: str) -> Run:
    """transformers' Trainer and peft on batches of 4, padded."""
    import peft
    import torch
    import transformers

    lora, clocks = adapter_of(name), []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            clocks.append(time.perf_counter())

    targets = "all-linear" if lora.targets == ("all-linear",) else list(lora.targets)
    settings = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, task_type="CAUSAL_LM"
    )
    data = samples()[: 4 * PEER_STEPS]
    with tempfile.TemporaryDirectory() as scratch:
        torch.cuda.reset_peak_memory_stats()
        run = transformers.Trainer(
            model=peft.get_peft_model(network(name), settings),
            args=peer_arguments(scratch),
            data_collator=pad,
            train_dataset=data,
            callbacks=[Clock()],
        )
        run.train()
    counts = [sum(len(s.tokens) for s in data[i : i + 4]) for i in range(0, len(data), 4)]
    speeds = np.divide(counts, np.diff(clocks, prepend=0.0))[WARM:]
    peak = torch.cuda.max_memory_allocated()
    del run
    release()
    return Run(speeds=list(speeds), peak=peak, loss=0.0)


def peer_arguments(scratch: str) -> Any:
    """Of Trainer: batches of 4 in order, and nothing beside the steps."""
    import transformers

    return transformers.TrainingArguments(
        output_dir=scratch,
        per_device_train_batch_size=4,
        max_steps=PEER_STEPS,
        learning_rate=RATE,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
    )


def pad(group: list[Sample]) -> dict[str, Any]:
    """A batch padded to its longest sample."""
    import torch

    width = max(len(s.tokens) for s in group)
    tokens = torch.zeros(len(group), width, dtype=torch.int64)
    labels, mask = torch.full_like(tokens, -100), torch.zeros_like(tokens)
    for row, sample in enumerate(group):
        tokens[row, : len(sample.tokens)] = torch.from_numpy(sample.tokens).long()
        mask[row, : len(sample.tokens)] = 1
    labels[mask == 1] = tokens[mask == 1]
    return {"input_ids": tokens, "labels": labels, "attention_mask": mask}


if __name__ == "__main__":
    main()
