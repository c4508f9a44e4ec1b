"""The trainings of bench_forecast.py: shapes of models, and what is trained on each device."""

from dataclasses import dataclass
from typing import Any

LLAMA: dict[str, Any] = {"model_type": "llama", "tie_word_embeddings": True}


def shape(base: dict[str, Any], sizes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """A config from (vocabulary, hidden, feed-forward, heads, kv heads, channels of a head)."""
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    keys += ("num_key_value_heads", "head_dim")
    return {**base, **dict(zip(keys, sizes, strict=True)), **more}


SHAPES = {
    "smollm2-135m": shape(LLAMA, (49152, 576, 1536, 9, 3, 64)),
    "llama-3.2-1b": shape(LLAMA, (128256, 2048, 8192, 32, 8, 64)),
    "qwen2.5-0.5b": shape({**LLAMA, "model_type": "qwen2"}, (151936, 896, 4864, 14, 2, 64)),
    "gemma-3-270m": shape(
        {**LLAMA, "model_type": "gemma3_text", "sliding_window": 512, "query_pre_attn_scalar": 256},
        (262144, 640, 2048, 4, 1, 256),
    ),
    # Only for the constants:
    "llama-a": shape(LLAMA, (32000, 768, 2304, 12, 4, 64)),
    "llama-b": shape(LLAMA, (65536, 1024, 2816, 16, 16, 64), tie_word_embeddings=False),
    "qwen3-a": shape({**LLAMA, "model_type": "qwen3"}, (65536, 768, 2048, 8, 4, 128)),
    "gemma-a": shape(
        {**LLAMA, "model_type": "gemma3_text", "sliding_window": 256, "query_pre_attn_scalar": 128},
        (65536, 512, 1536, 4, 2, 128),
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training: `method` is lora, full or qlora; `split` samples fill a row of `tokens`."""

    shape: str
    layers: int
    method: str
    tokens: int
    rows: int = 1
    split: int = 1
    checkpointing: bool = False
    dtype: str = "auto"
    engine: str = "torch"

    @property
    def name(self) -> str:
        """In words."""
        spared = ", checkpointing" if self.checkpointing else ""
        rows = f"{self.rows} x {self.tokens}" if self.rows > 1 else str(self.tokens)
        return f"{self.shape}, {self.layers} layers, {self.method}, {rows}{spared}, {self.dtype}"


def run(name: str, layers: int, method: str, tokens: int, **more: Any) -> Run:
    """A run, its first four figures in order."""
    return Run(shape=name, layers=layers, method=method, tokens=tokens, **more)


CPU = [
    run("smollm2-135m", 30, "lora", 1024, split=4),
    run("smollm2-135m", 12, "full", 256),
    run("smollm2-135m", 4, "lora", 8192, split=4, checkpointing=True),
    run("smollm2-135m", 12, "qlora", 2048, split=2),
    run("gemma-3-270m", 18, "lora", 512, split=2),
    run("gemma-3-270m", 6, "lora", 2048, split=8, checkpointing=True),
    run("llama-3.2-1b", 4, "lora", 1024, split=2),
    run("llama-3.2-1b", 3, "lora", 2048, split=4, checkpointing=True, dtype="float32"),
    run("llama-3.2-1b", 6, "qlora", 512),
    run("qwen2.5-0.5b", 8, "lora", 2048, split=4),
    run("qwen2.5-0.5b", 4, "lora", 512, split=2, dtype="float32"),
    run("qwen2.5-0.5b", 6, "lora", 4096, split=8, checkpointing=True),
]
CPU_FIT = [
    run("llama-a", 12, "lora", 768, split=3),
    run("llama-a", 12, "lora", 768, split=3, dtype="float32"),
    run("llama-a", 6, "lora", 3072, split=6, checkpointing=True),
    run("llama-a", 6, "full", 384),
    run("llama-a", 8, "qlora", 1536, split=3),
    run("llama-b", 8, "lora", 1536, split=3),
    run("qwen3-a", 8, "lora", 1536, split=3),
    run("gemma-a", 8, "lora", 1536, split=6),
    run("gemma-a", 4, "full", 768, split=6, dtype="float32"),
]
CUDA = [
    run("smollm2-135m", 30, "lora", 8192, split=16),
    run("smollm2-135m", 30, "full", 4096, split=8),
    run("smollm2-135m", 30, "lora", 4096, split=8, rows=2, checkpointing=True),
    run("smollm2-135m", 30, "qlora", 2048),
    run("gemma-3-270m", 18, "lora", 2048, split=8),
    run("gemma-3-270m", 18, "lora", 8192, split=16, checkpointing=True),
    run("llama-3.2-1b", 16, "lora", 8192, split=8),
    run("llama-3.2-1b", 16, "lora", 1024, checkpointing=True),
    run("llama-3.2-1b", 4, "qlora", 4096, split=4),
    run("llama-3.2-1b", 8, "full", 2048, split=4),
    run("qwen2.5-0.5b", 24, "lora", 4096, split=8),
    run("qwen2.5-0.5b", 24, "lora", 256),
]
CUDA_FIT = [
    run("llama-a", 12, "lora", 6144, split=6),
    run("llama-b", 8, "lora", 3072, split=6, checkpointing=True),
    run("llama-a", 12, "full", 3072, split=6),
    run("llama-a", 12, "qlora", 3072, split=6),
    run("qwen3-a", 8, "lora", 3072, split=6),
    run("gemma-a", 8, "lora", 3072, split=12),
    run("gemma-a", 8, "full", 1536, split=6),
]
SETS = {"cpu": (CPU, CPU_FIT), "cuda": (CUDA, CUDA_FIT)}
# Of the other engines, on a CPU, where both compute in float32.
MLX = [
    run("smollm2-135m", 8, "lora", 1024, split=2, engine="mlx"),
    run("smollm2-135m", 8, "lora", 512, checkpointing=True, engine="mlx"),
    run("qwen2.5-0.5b", 4, "lora", 512, split=2, engine="mlx"),
]
JAX = [
    run("smollm2-135m", 8, "lora", 1024, split=2, engine="jax"),
    run("smollm2-135m", 8, "lora", 1024, split=2, checkpointing=True, engine="jax"),
    run("qwen2.5-0.5b", 4, "lora", 512, split=2, engine="jax"),
]
OTHERS = {"mlx": MLX, "jax": JAX}
