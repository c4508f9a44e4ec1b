"""The architecture of a model, read from its config.json."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pippin.errors import ModelError
from pippin.model.names import CONFIG

# Other spellings of the same figure, by family; the first that is there counts.
_SPELLINGS = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab_size": ("vocab_size",),
}
_INNER = ("intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """What pippin needs to know of an architecture; `raw` is the whole config.json."""

    architecture: str
    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool
    max_positions: int | None
    dtype: str
    sliding_window: int | None
    quantization: dict[str, Any] | None
    raw: dict[str, Any]


def read_raw(folder: Path) -> dict[str, Any]:
    """config.json as it stands. Raises ModelError where there is none, or it is no JSON object."""
    path = folder / CONFIG
    try:
        raw = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise ModelError(
            f"{folder} has no {CONFIG}", "give a folder in Hugging Face's format"
        ) from None
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}", "fetch the model again") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path} holds no JSON object", "fetch the model again")
    return raw


def write_raw(folder: Path, raw: dict[str, Any]) -> None:
    """Write config.json."""
    (folder / CONFIG).write_text(json.dumps(raw, indent=2) + "\n")


def read_config(folder: Path) -> ModelConfig:
    """The architecture. Raises ModelError for a missing file or figure."""
    return parse_config(read_raw(folder), folder)


def parse_config(raw: dict[str, Any], folder: Path) -> ModelConfig:
    """The architecture of a config.json; a multimodal one gives its text model's."""
    text = raw | raw["text_config"] if isinstance(raw.get("text_config"), dict) else raw
    figure = {name: _figure(text, spellings, folder) for name, spellings in _SPELLINGS.items()}
    hidden, heads = figure["hidden_size"], figure["num_heads"]
    inner = text.get("intermediate_size") or text.get("n_inner") or 4 * hidden
    for key in ("intermediate_size", "num_key_value_heads", "head_dim"):
        value = text.get(key)
        if isinstance(value, str | float) or (isinstance(value, int) and value < 0):
            raise ModelError(f"{folder / CONFIG}: {key} is {value!r}", "fetch the model again")
    return ModelConfig(
        architecture=(raw.get("architectures") or [""])[0],
        model_type=text.get("model_type", ""),
        num_layers=figure["num_layers"],
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or hidden // heads,
        vocab_size=figure["vocab_size"],
        tied_embeddings=_tied(raw, text),
        max_positions=next((text[key] for key in _POSITIONS if text.get(key)), None),
        dtype=text.get("dtype") or text.get("torch_dtype") or "float32",
        sliding_window=_window(text),
        quantization=raw.get("quantization"),
        raw=raw,
    )


def untied(raw: dict[str, Any]) -> dict[str, Any]:
    """The config of the same model with a head of its own."""
    changed = raw | {"tie_word_embeddings": False}
    if isinstance(raw.get("text_config"), dict):
        changed["text_config"] = raw["text_config"] | {"tie_word_embeddings": False}
    return changed


def with_dtype(raw: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The config with the dtype its tensors have, under the old and the new spelling."""
    return raw | {"dtype": dtype, "torch_dtype": dtype}


def without_quantization(raw: dict[str, Any]) -> dict[str, Any]:
    """The config of the dense model."""
    return {key: value for key, value in raw.items() if not key.startswith("quantization")}


def with_rope_keys(raw: dict[str, Any]) -> dict[str, Any]:
    """The config with rope's figures at top level too, where mlx-lm looks for them.

    transformers 5 writes `rope_parameters`; a reader that does not know the key falls back to a
    theta of 10000 and computes other logits without a word. Where kinds of layers differ, those of
    full attention are the plain figures.
    """
    changed = dict(raw)
    if isinstance(raw.get("text_config"), dict):
        changed["text_config"] = with_rope_keys(raw["text_config"])
    rope = raw.get("rope_parameters")
    if not isinstance(rope, dict):
        return changed
    if isinstance(rope.get("full_attention"), dict):
        local = rope.get("sliding_attention") or {}
        if "rope_theta" in local:
            changed["rope_local_base_freq"] = local["rope_theta"]
        if "full_attention" in (raw.get("layer_types") or ()):
            changed["sliding_window_pattern"] = raw["layer_types"].index("full_attention") + 1
        rope = rope["full_attention"]
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope:
            changed[key] = rope[key]
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    if scaling.get("rope_type", "default") != "default":
        changed["rope_scaling"] = scaling
    return changed


def shrunk(raw: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """The config of a small model with the same arithmetic: few layers, a small vocabulary.

    As many layers are left as show every kind there is; widths of attention stay, and so do all
    figures that are no sizes.
    """
    changed = dict(raw)
    kinds = raw.get("layer_types") or []
    kept = max([2, raw.get("sliding_window_pattern") or 0, *(kinds.index(k) + 1 for k in kinds)])
    for key in _SPELLINGS["num_layers"]:
        if isinstance(raw.get(key), int):
            changed[key] = min(kept, raw[key])
    if kinds:
        changed["layer_types"] = kinds[:kept]
    for key in _INNER:
        if isinstance(raw.get(key), int):
            changed[key] = min(256, raw[key])
    for number, key in enumerate(("pad_token_id", "bos_token_id", "eos_token_id")):
        changed[key] = number
    return changed | {"vocab_size": vocabulary}


def _figure(text: dict[str, Any], spellings: tuple[str, ...], folder: Path) -> int:
    for key in spellings:
        if isinstance(text.get(key), int) and text[key] > 0:
            return text[key]
    raise ModelError(
        f"{folder / CONFIG} has no {spellings[0]}",
        "pippin adapts decoder language models; this config describes something else",
    )


def _tied(raw: dict[str, Any], text: dict[str, Any]) -> bool:
    tied = raw.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    return bool(_family_ties(text.get("model_type", "")) if tied is None else tied)


def _family_ties(model_type: str) -> bool:
    """A config that is silent means its family's default, which transformers alone knows."""
    from transformers import CONFIG_MAPPING

    try:
        family = CONFIG_MAPPING[model_type]  # its `get` does not know families not yet imported
    except KeyError:
        return False
    return bool(getattr(family, "tie_word_embeddings", False))


def _window(text: dict[str, Any]) -> int | None:
    window = text.get("sliding_window")
    return window if window and text.get("use_sliding_window", True) else None
