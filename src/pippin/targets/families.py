"""Which models the shared decoder computes; targets built on it refuse the others at once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pippin.model.config import ModelConfig, read_config
from pippin.targets import Refusal

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
# Norms scale by 1 + weight, the embedding by the root of its width.
GEMMAS = ("gemma", "gemma2", "gemma3_text")
# Every how many layers one attends to everything, where the config is silent.
_PATTERNS = {"gemma2": 2, "gemma3_text": 6}
# Targets whose caches mask by themselves what lies before a window.
MASKED = ("coreai", "coreml", "executorch", "executorch-coreml", "executorch-mlx")
# Those that compute the Gemmas.
GEMMA = ("coreai", "coreml", "executorch", "executorch-coreml")
# Those whose attention caps its scores as Gemma 2 does.
CAPPED = ("coreai", "coreml", "executorch-coreml")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# transformers' names of the two activations that the decoder has.
ACTIVATIONS = {False: "silu", True: "gelu_pytorch_tanh"}


def refuse_family(target: str, checkpoint: Path) -> Iterator[Refusal]:
    """Every reason why the decoder cannot compute the model in the folder, as (message, hint)."""
    config, masked = read_config(checkpoint), target in MASKED
    built = (*MODEL_TYPES, *GEMMAS) if target in GEMMA else MODEL_TYPES
    window = next((size for size in windows_of(config) if size is not None), None)
    if window is not None and not masked:
        yield (
            f"{target}: {config.model_type} has sliding-window attention ({window} tokens), which "
            "its attention operator does not mask",
            f"deploy to one of {', '.join(MASKED)}, or a model with full attention in every layer",
        )
    elif config.model_type not in built:
        yield (
            f"{target}: model type {config.model_type} is not built, only {', '.join(built)}",
            "deploy a model of one of these families",
        )
    elif config.raw.get("attn_logit_softcapping") and target not in CAPPED:
        yield (
            f"{target}: {config.model_type} caps its attention scores, its attention operator none",
            f"deploy to one of {', '.join(CAPPED)}",
        )
    yield from _refuse_details(target, config)


def windows_of(config: ModelConfig) -> tuple[int | None, ...]:
    """How many tokens back each layer attends, None for all."""
    window, layers = config.sliding_window, range(config.num_layers)
    if kinds := config.raw.get("layer_types"):
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if pattern := config.raw.get("sliding_window_pattern", _PATTERNS.get(config.model_type)):
        return tuple(window if (i + 1) % pattern else None for i in layers)
    full = config.raw.get("max_window_layers", 0)
    return tuple(window if i >= full else None for i in layers)


def _refuse_details(target: str, config: ModelConfig) -> Iterator[Refusal]:
    for rope in _ropes(config.raw):
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ROPE_TYPES:
            yield (
                f"{target}: rope type {kind} changes with the length of the prompt",
                f"deploy a model whose rope type is one of {', '.join(ROPE_TYPES)}",
            )
    wanted = ACTIVATIONS[config.model_type in GEMMAS]
    found = config.raw.get("hidden_activation") or config.raw.get("hidden_act") or wanted
    if found != wanted:
        yield (
            f"{target}: activation {found} is not built",
            f"deploy a model with {wanted}",
        )


def _ropes(raw: dict[str, Any]) -> list[dict[str, Any]]:
    """Rope's figures of every kind of layer."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kinds = [value for value in rope.values() if isinstance(value, dict)]
    return kinds or [rope]
