"""Tiny random models as quantized folders, with a byte-level tokenizer of 300 tokens."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pippin.model.quantized import GRIDS_KEY, pack
from pippin.quantizers import Grid, load_quantizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{{ message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEAR = Grid(bits=4, group_size=32, symmetric=True)
CHANNEL = Grid(bits=8, group_size=32, symmetric=True, per_channel=True)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "untied": ("LlamaConfig", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
    "odd_heads": ("LlamaConfig", {"head_dim": 10, "num_attention_heads": 16}),
    # The widths of OpenLLaMA 3B.
    "openllama": (
        "LlamaConfig",
        {
            "head_dim": 100,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "intermediate_size": 8640,
            "tie_word_embeddings": False,
        },
    ),
    "llama3_rope": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "wide": ("LlamaConfig", {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
}
GEMMA: tuple[str, dict[str, Any]] = (
    "Gemma3TextConfig",
    {"num_hidden_layers": 6, "sliding_window": 8, "query_pre_attn_scalar": 16},
)
# Attention that looks back so far only, scores and logits that are capped, scales of their own.
_WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 12.0}
WINDOWED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2Config", {**_WINDOW, **_CAPS, "query_pre_attn_scalar": 24}),
    "gemma3_short": ("Gemma3TextConfig", {**_WINDOW, "query_pre_attn_scalar": 24}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
}

Choose = Callable[[str], Grid | None]


def usual(module: str) -> Grid | None:
    """The grids this target's recipe asks for: int4 linears, an int8 embedding."""
    return CHANNEL if module.endswith(("embed_tokens", "lm_head")) else LINEAR


def write_folder(folder: Path, kind: str = "llama", choose: Choose = usual) -> Path:
    """A quantized folder of a kind; `choose` gives each matrix its grid, None leaves it dense."""
    config, state = _network(kind)
    write_quantized(folder, config, state, choose)
    _write_tokenizer(folder)
    return folder


def write_quantized(
    folder: Path, config: dict[str, Any], state: dict[str, Any], choose: Choose
) -> None:
    """config.json and model.safetensors of dense weights, rounded to nearest."""
    from safetensors.numpy import save_file

    quantization: dict[str, Any] = {"group_size": 32, "bits": 4}
    tensors: dict[str, Any] = {}
    nested: dict[str, Any] = {}
    for name, value in state.items():
        module = name.removesuffix(".weight")
        grid = choose(module) if value.ndim == 2 else None
        if grid is None:
            tensors[name] = value
            continue
        quantization[module] = {"group_size": grid.group_size, "bits": grid.bits}
        if grid.nested:
            nested[module] = {"symmetric": grid.symmetric, "nested": True}
        tensors |= _quantize(module, value, grid)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps({**config, "quantization": quantization, GRIDS_KEY: nested})
    (folder / "config.json").write_text(text)


def _network(kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    import torch
    import transformers

    name, extra = {**KINDS, **WINDOWED, "gemma3": GEMMA}[kind]
    config = getattr(transformers, name)(**{**SHAPE, **extra})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in network.parameters():
            if parameter.dim() == 1:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    state = {name: value.numpy() for name, value in network.state_dict().items()}
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    return config.to_dict(), state


def _quantize(module: str, weight: Any, grid: Grid) -> dict[str, Any]:
    import ml_dtypes

    codes = load_quantizer("rtn").quantize(weight, grid, np.dtype(ml_dtypes.bfloat16))
    return {
        f"{module}.weight": pack(codes.codes_OI, grid.bits),
        f"{module}.scales": codes.scales_OG,
        f"{module}.biases": codes.biases_OG,
    }


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<unk>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["the cat sat on the mat and that was that"] * 9, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    fast.chat_template = CHATML
    fast.save_pretrained(folder)
