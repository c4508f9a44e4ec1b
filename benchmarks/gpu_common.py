"""What the benchmarks on one CUDA device share: shapes, adapters, samples, limits, a run's row."""

from dataclasses import dataclass
from typing import Any

import numpy as np

import common
from pippin import recipe
from pippin.data.batches import Sample

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
    "w1r16": recipe.Lora(rank=16, alpha=32.0, targets=("q_proj", "v_proj")),
    "w2": recipe.Lora(rank=16, alpha=32.0, targets=("all-linear",)),
    "w3": recipe.Lora(rank=16, alpha=32.0, targets=("all-linear",)),
}
SAMPLES, SHORTEST, MEAN, LONGEST, SPREAD, RATE = 4096, 24, 216, 1024, 0.6, 2e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What one configuration gave: real tokens a second by step, bytes, nats, graphs, seconds."""

    speeds: list[float]
    peak: int
    loss: float
    grad_norm: float = 0.0
    compiled: int = 0
    compiling: float = 0.0
    notices: tuple[str, ...] = ()

    @property
    def speed(self) -> float:
        """Real tokens a second: the median step's."""
        return float(np.median(self.speeds))

    @property
    def spread(self) -> float:
        """The steps' standard deviation over their mean."""
        return round(float(np.std(self.speeds) / np.mean(self.speeds)), 3)

    @property
    def gib(self) -> float:
        """The peak."""
        return round(self.peak / 2**30, 1)


def describe(run: Run) -> str:
    """A line to read while it runs."""
    return (
        f"{run.speed:.0f} tok/s, {run.gib} GiB, loss {run.loss:.4f}, norm {run.grad_norm:.4f}, "
        f"{run.compiled} graphs, compiled in {run.compiling:.1f} s {run.notices}"
    )


def speed_row(
    name: str, best: Run, limit: float, peers: dict[str, float], notes: dict[str, Any]
) -> common.Row:
    """Real tokens a second beside the limit."""
    return common.Row(
        name=name,
        value=round(best.speed),
        unit="real tokens per second",
        better="higher",
        limit=round(limit),
        share_of_limit=round(best.speed / limit, 3),
        peers=peers,
        spread=best.spread,
        notes={"peak GiB": best.gib, "first loss": round(best.loss, 4), **notes},
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


def release() -> None:
    """Give the device's memory back before the next configuration."""
    import gc

    import torch

    gc.collect()
    torch.cuda.empty_cache()
