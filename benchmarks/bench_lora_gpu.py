"""LoRA training on one CUDA device: pippin beside transformers' Trainer with peft, random weights.

The shape is OpenLLaMA-3B-v2's, Qwen2.5-7B's for w3; 4,096 samples have log-normal lengths of mean
216, from 24 to 1,024 tokens. pippin packs them into rows, Trainer pads batches of 4; only real
tokens count.
"""

import argparse
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import common
from pippin import recipe
from pippin.data.batches import Batch, BatchPlan, Sample

OPEN_LLAMA_3B = {
    "vocab_size": 32000,
    "hidden_size": 3200,
    "intermediate_size": 8640,
    "num_hidden_layers": 26,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 100,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
QWEN2_7B = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
ADAPTERS = {
    "w1": recipe.Lora(rank=8, alpha=16.0, targets=("q_proj", "v_proj")),
    "w2": recipe.Lora(rank=16, alpha=32.0, targets=("all-linear",)),
    "w3": recipe.Lora(rank=16, alpha=32.0, targets=("all-linear",)),
}
SAMPLES, SHORTEST, MEAN, LONGEST, SPREAD = 4096, 24, 216, 1024, 0.6
WARM, STEPS, PEER_STEPS, RATE = 3, 20, 24, 2e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What one configuration gave."""

    speeds: list[float]
    peak: int
    loss: float
    grad_norm: float
    compiled: int = 0
    notices: tuple[str, ...] = ()

    @property
    def speed(self) -> float:
        """Real tokens a second: the median step's."""
        return float(np.median(self.speeds))


def main() -> None:
    """Measure the ceiling, every configuration and the peer, then print the rows."""
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--only", default="w1-bf16,w2-bf16", help="of w1, w2, w3 and bf16, fp8")
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


def describe(run: Run) -> str:
    """A line to read while it runs."""
    return (
        f"{run.speed:.0f} tok/s, {run.peak / 2**30:.1f} GiB, loss {run.loss:.4f}, "
        f"norm {run.grad_norm:.4f}, {run.compiled} graphs {run.notices}"
    )


def row_of(
    name: str, runs: dict[int, Run], peers: dict[str, float], ceilings: dict[str, float]
) -> common.Row:
    """The fastest packing, with the others in the notes."""
    tokens = max(runs, key=lambda t: runs[t].speed)
    best, limit = runs[tokens], 1.0 / seconds_per_token(name, ceilings)
    return common.Row(
        name=f"lora-{name}",
        value=round(best.speed),
        unit="real tokens per second",
        better="higher",
        limit=round(limit),
        share_of_limit=round(best.speed / limit, 3),
        peers=peers,
        spread=round(float(np.std(best.speeds) / np.mean(best.speeds)), 3),
        notes={
            "tokens a step": tokens,
            "peak GiB": round(best.peak / 2**30, 1),
            "first loss": round(best.loss, 4),
            "first gradient norm": round(best.grad_norm, 4),
            "graphs compiled": best.compiled,
            "matmul TFLOP/s": {kind: round(rate / 1e12) for kind, rate in ceilings.items()},
            "other packings": {str(t): round(run.speed) for t, run in runs.items() if t != tokens},
        },
    )


def device() -> tuple[str, int]:
    """The GPU's name and its memory in GB."""
    import torch

    return torch.cuda.get_device_name(), round(
        torch.cuda.get_device_properties(0).total_memory / 1e9
    )


def samples() -> list[Sample]:
    """Random tokens of the workload's lengths, all of them scored."""
    rng = np.random.default_rng(0)
    middle = np.log(MEAN) - SPREAD**2 / 2
    lengths = np.clip(rng.lognormal(middle, SPREAD, SAMPLES), SHORTEST, LONGEST).astype(int)
    return [
        Sample(
            tokens=rng.integers(3, OPEN_LLAMA_3B["vocab_size"], n).astype(np.int32),
            scored=np.arange(n) > 0,
            row=row,
        )
        for row, n in enumerate(lengths)
    ]


def shape_of(name: str) -> dict[str, Any]:
    """Of `w1-bf16`, w1's."""
    return QWEN2_7B if name.startswith("w3") else OPEN_LLAMA_3B


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


def pippin(name: str, tokens: int, options: argparse.Namespace) -> Run:
    """Our trainer over our packing, `tokens` in one row a step."""
    import torch

    from pippin.engines.torch.compiled import graphs
    from pippin.engines.torch.names import lora_parameters
    from pippin.engines.torch.trainer import TorchTrainer

    made, lora = network(name), adapter_of(name)
    frozen: Any = "float8" if name.endswith("fp8") else "auto"
    train = recipe.Train(row_tokens=tokens, learning_rate=RATE, frozen_dtype=frozen)
    before, start = graphs(), time.perf_counter()
    parameters = lora_parameters(made, lora, first_adapter(made, lora))
    trained = TorchTrainer(made, parameters, train, 0)
    print(f"ready after {time.perf_counter() - start:.0f} s", flush=True)
    torch.cuda.reset_peak_memory_stats()
    plan = BatchPlan(samples(), train, seed=0)
    results, clocks, counts, compiled = [], [], [], 0
    for step in range(WARM + STEPS):
        batches = plan.batches(step)
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
    del made, trained, parameters
    release()
    return run


def release() -> None:
    """Give the device's memory back before the next configuration."""
    import gc

    import torch

    gc.collect()
    torch.cuda.empty_cache()


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
        arguments = transformers.TrainingArguments(
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
        torch.cuda.reset_peak_memory_stats()
        run = transformers.Trainer(
            model=peft.get_peft_model(network(name), settings),
            args=arguments,
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
    return Run(speeds=list(speeds), peak=peak, loss=0.0, grad_norm=0.0)


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


def adapter_of(name: str) -> recipe.Lora:
    """The adapter of `w1-bf16` is w1's."""
    return ADAPTERS[name.partition("-")[0]]


def seconds_per_token(name: str, ceilings: dict[str, float]) -> float:
    """Matrix products that nobody can leave out: 4 a frozen weight and 6 an adapter's weight.

    The head counts for every token. Attention, about 1 % at these lengths, is left out.
    """
    shape, rank = shape_of(name), adapter_of(name).rank
    hidden, wide, vocab = (shape[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    layers, heads = shape["num_hidden_layers"], shape["num_attention_heads"]
    kv = hidden * shape["num_key_value_heads"] // heads
    sides = {"q": (hidden, hidden), "k": (hidden, kv), "v": (hidden, kv), "o": (hidden, hidden)}
    sides |= {"gate": (hidden, wide), "up": (hidden, wide), "down": (wide, hidden)}
    dense = layers * sum(inputs * outputs for inputs, outputs in sides.values())
    adapted = "qv" if name.startswith("w1") else sides
    narrow = sum(sum(sides[key]) for key in adapted)
    rest = 4.0 * hidden * vocab + 6.0 * layers * rank * narrow
    return 4.0 * dense / ceilings[name.partition("-")[2]] + rest / ceilings["bf16"]


def matmul_flops(kind: str) -> float:
    """Operations a second of an 8,192-cube product of random numbers, when the card is warm."""
    import torch

    from pippin.engines.torch.float8 import round_rows

    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    (codes, scale), (other, far) = round_rows(a), round_rows(b)
    scales = {"scale_a": scale, "scale_b": far.T, "out_dtype": a.dtype, "use_fast_accum": True}
    times = []
    for _ in range(12):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(100):
            _ = a @ b if kind == "bf16" else torch._scaled_mm(codes, other.T, **scales)
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1e5)
    return 2.0 * size**3 / float(np.median(times[5:]))


if __name__ == "__main__":
    main()
