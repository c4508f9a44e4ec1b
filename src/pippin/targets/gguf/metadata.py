"""The architecture's figures under GGUF's keys.

Shape letters: C head channels.
"""

import math
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from pippin.model.config import ModelConfig
from pippin.targets.gguf.constraint import rope_of


def add_figures(writer: gguf.GGUFWriter, config: ModelConfig, kind: gguf.LlamaFileType) -> None:
    """Everything llama.cpp must know of the network beside its tensors."""
    raw = config.raw
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_file_type(kind)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    writer.add_block_count(config.num_layers)
    if config.max_positions is not None:
        writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(raw.get("rms_norm_eps", 1e-6))
    writer.add_rope_dimension_count(config.head_dim)
    _add_rope(writer, config)
    if config.model_type == "gemma3_text" and config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)


def _add_rope(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    rope = rope_of(config)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type", rope.get("type")) == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def rope_factors(config: ModelConfig) -> NDArray[np.float32] | None:
    """By what each frequency is divided, (C / 2,), where the rope type is Llama 3's; else None.

    Long wavelengths are stretched by the factor, short ones kept, those between are blended
    (https://huggingface.co/meta-llama/Llama-3.1-8B).
    """
    rope: dict[str, Any] = rope_of(config)
    if rope.get("rope_type", rope.get("type")) != "llama3":
        return None
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    context = rope["original_max_position_embeddings"]
    exponents_C = np.arange(0, config.head_dim, 2) / config.head_dim
    turns_C = context * rope["rope_theta"] ** -exponents_C / (2 * math.pi)
    blend_C = np.clip((turns_C - low) / (high - low), 0, 1)
    return (1 / ((1 - blend_C) / factor + blend_C)).astype(np.float32)
