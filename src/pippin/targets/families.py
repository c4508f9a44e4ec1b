"""Which models the shared decoder computes; targets built on it refuse the others at once."""

from collections.abc import Iterator
from pathlib import Path

from pippin.model.config import ModelConfig, read_config
from pippin.targets import Refusal

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def refuse_family(target: str, checkpoint: Path) -> Iterator[Refusal]:
    """Every reason why the decoder cannot compute the model in the folder, as (message, hint)."""
    config = read_config(checkpoint)
    window = window_of(config)
    if window is not None:
        yield (
            f"{target}: {config.model_type} has sliding-window attention ({window} tokens); "
            "its ring-buffer cache is not built",
            "deploy a model with full attention in every layer",
        )
    elif config.model_type not in MODEL_TYPES:
        yield (
            f"{target}: model type {config.model_type} is not built, only {', '.join(MODEL_TYPES)}",
            "deploy a model of one of these families",
        )
    yield from _refuse_details(target, config)


def window_of(config: ModelConfig) -> int | None:
    """The window of the model's sliding layers, None where every layer attends to everything."""
    layers = config.raw.get("layer_types")
    if layers is not None and "sliding_attention" not in layers:
        return None
    return config.sliding_window


def _refuse_details(target: str, config: ModelConfig) -> Iterator[Refusal]:
    rope = config.raw.get("rope_parameters") or config.raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        yield (
            f"{target}: rope type {kind} changes with the length of the prompt",
            f"deploy a model whose rope type is one of {', '.join(ROPE_TYPES)}",
        )
    if config.raw.get("hidden_act", "silu") != "silu":
        yield (
            f"{target}: activation {config.raw['hidden_act']} is not built",
            "deploy a model with silu",
        )
