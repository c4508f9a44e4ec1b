"""Tensor and file names as Hugging Face and GGUF spell them; no other file knows them."""

import re

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
INDEX = "model.safetensors.index.json"
HEAD = "lm_head.weight"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
MAGNITUDE = "lora_magnitude_vector"

# What a model folder holds besides its weights and its config.
SIDE_FILES = (
    GENERATION_CONFIG,
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template.jinja",
    "chat_template.json",
)
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

_EMBEDDINGS = frozenset({"embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings"})
_HEADS = frozenset({"lm_head", "embed_out"})
_POSITIONS = frozenset({"wpe", "embed_positions", "position_embeddings"})
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_OTHER_TOWERS = re.compile(r"(?:^|\.)(?:vision|audio)\w*\.")
# GPT-2's Conv1D keeps its weight as (inputs, outputs).
_CONV1D = {
    "gpt2": frozenset({"c_attn", "c_proj", "c_fc", "q_attn"}),
    "openai-gpt": frozenset({"c_attn", "c_proj", "c_fc"}),
}

# GGUF block tensors of the llama family, by their stem.
_GGUF_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


def last(module: str) -> str:
    """The last part of a module's name: `q_proj` of `model.layers.0.self_attn.q_proj`."""
    return module.rpartition(".")[2]


def module(tensor: str) -> str:
    """The module a weight belongs to: its name without `.weight`."""
    return tensor.removesuffix(".weight")


def layer(tensor: str) -> int | None:
    """The number of the decoder layer, None outside the layers."""
    found = _LAYER.search(tensor)
    return int(found[1]) if found else None


def is_embedding(module: str) -> bool:
    """Whether the module is the token embedding."""
    return last(module) in _EMBEDDINGS and layer(module) is None


def is_head(module: str) -> bool:
    """Whether the module is the output head."""
    return last(module) in _HEADS and layer(module) is None


def is_linear(tensor: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is the weight of a linear, inside a decoder layer or the output head.

    A router of experts is none: its framework module is no linear.
    """
    name = module(tensor)
    if not tensor.endswith(".weight") or len(shape) != 2 or _OTHER_TOWERS.search(tensor):
        return False
    if is_embedding(name) or last(name) in _POSITIONS | _ROUTERS or "norm" in last(name):
        return False
    return layer(tensor) is not None or is_head(name)


def is_expert(module: str) -> bool:
    """Whether the linear belongs to one expert of several in its layer."""
    return ".experts." in module


def is_transposed(model_type: str, module: str) -> bool:
    """Whether the weight is stored as (inputs, outputs), as GPT-2's Conv1D does."""
    return last(module) in _CONV1D.get(model_type, frozenset())


def natural(name: str) -> list[tuple[int, str]]:
    """A sort key that puts layer 2 before layer 10."""
    return [(int(p), "") if p.isdigit() else (-1, p) for p in re.split(r"(\d+)", name)]


def from_gguf(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor of the llama family; None for an unknown one."""
    stem, _, kind = name.rpartition(".")
    if stem in _GGUF_TOP:
        return f"{_GGUF_TOP[stem]}.{kind}"
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if block is None or block[2] not in _GGUF_BLOCK:
        return None
    return f"model.layers.{block[1]}.{_GGUF_BLOCK[block[2]]}.{kind}"
