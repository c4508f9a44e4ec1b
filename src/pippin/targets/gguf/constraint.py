"""What a GGUF file can hold, checked before anything is trained or quantized."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pippin.model import names
from pippin.model.config import ModelConfig, read_config
from pippin.model.weights import Checkpoint
from pippin.recipe import Quantize
from pippin.targets import Refusal

ROPE_TYPES = ("default", "linear", "llama3")
# llama.cpp's Gemma 3 attends to everything in every sixth layer, and to a window in the others.
GEMMA_PATTERN = 6


def refuse_quantize(quantize: Quantize) -> Iterator[Refusal]:
    """Every reason why codes made this way cannot be stored in GGUF, as (message, hint)."""
    parts = (
        ("linears", "", quantize.bits, quantize.scheme),
        ("embedding", "embed_", quantize.embed_bits, quantize.embed_scheme),
    )
    for what, prefix, bits, scheme in parts:
        if scheme == "affine" and 5 < bits < 16:
            yield (
                f"gguf: no type holds {bits}-bit codes with zero points, as the {what} would have",
                f'set quantize.{prefix}scheme = "symmetric"',
            )


def refuse_scales(checkpoint: Path) -> Iterator[Refusal]:
    """The reason why scales of these weights would be rounded: they have the weights' dtype."""
    if read_config(checkpoint).quantization:
        return
    tensors = Checkpoint(checkpoint).tensors
    linears = (info for name, info in tensors.items() if names.is_linear(name, info.shape))
    if any(info.dtype.name == "float32" for info in linears):
        yield (
            "gguf: GGUF stores scales in float16, this model's weights and so its scales are "
            "float32",
            "start from a model in bfloat16 or float16",
        )


def refuse_tokenizer(checkpoint: Path) -> Iterator[Refusal]:
    """The reason why llama.cpp could not cut text into bytes' pairs: there are none."""
    file = checkpoint / "tokenizer.json"
    model = json.loads(file.read_text())["model"] if file.is_file() else {}
    if model.get("type") == "BPE" and not (model.get("byte_fallback") or model.get("merges")):
        yield (
            f"gguf: the tokenizer in {checkpoint} merges no pairs, which llama.cpp has no name for",
            "deploy to another target",
        )


def refuse_model(checkpoint: Path) -> Iterator[Refusal]:
    """Every reason why llama.cpp could not run the model in the folder, as (message, hint)."""
    from pippin.targets.gguf.tensors import ARCHITECTURES

    config = read_config(checkpoint)
    if config.model_type not in ARCHITECTURES:
        yield (
            f"gguf: model type {config.model_type} is not built, only {', '.join(ARCHITECTURES)}",
            "deploy a model of one of these families",
        )
        return
    yield from _refuse_attention(config)
    for rope in _ropes(config):
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ROPE_TYPES:
            yield (
                f"gguf: rope type {kind} is not built, only {', '.join(ROPE_TYPES)}",
                "deploy to another target",
            )


def _refuse_attention(config: ModelConfig) -> Iterator[Refusal]:
    layers = config.raw.get("layer_types")
    full = [kind == "full_attention" for kind in layers or []]
    if config.model_type != "gemma3_text":
        if config.sliding_window is not None and not (layers and all(full)):
            yield (
                f"gguf: {config.model_type} has sliding-window attention "
                f"({config.sliding_window} tokens), which llama.cpp runs for Gemma alone",
                "deploy a model with full attention in every layer",
            )
        return
    wanted = [(i + 1) % GEMMA_PATTERN == 0 for i in range(config.num_layers)]
    if layers is not None and full != wanted:
        yield (
            "gguf: llama.cpp's Gemma 3 has full attention in every sixth layer, this model not",
            "deploy to another target",
        )
    if config.raw.get("query_pre_attn_scalar", config.head_dim) != config.head_dim:
        yield (
            f"gguf: attention is scaled by {config.raw['query_pre_attn_scalar']}, not by the "
            f"head's {config.head_dim} channels",
            "deploy to another target",
        )


def rope_of(config: ModelConfig) -> dict[str, Any]:
    """Rope's figures of the layers that attend to everything, theta included."""
    rope = config.raw.get("rope_parameters") or config.raw.get("rope_scaling") or {}
    rope = rope.get("full_attention", rope)
    return {"rope_theta": config.raw.get("rope_theta", 10000.0), **rope}


def _ropes(config: ModelConfig) -> Iterator[dict[str, Any]]:
    yield rope_of(config)
    local = (config.raw.get("rope_parameters") or {}).get("sliding_attention")
    if local is not None:
        yield local
