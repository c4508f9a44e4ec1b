"""config.json of several families, in the spellings transformers has used."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, Gemma3TextConfig, GPT2Config, LlamaConfig, Qwen2Config

from pippin.errors import ModelError
from pippin.model.config import parse_config, read_config, untied, with_rope_keys

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
}


def test_llama(tmp_path: Path) -> None:
    config = parse_config(LLAMA, tmp_path)
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (3, 64, 160)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.vocab_size, config.max_positions, config.dtype) == (99, 256, "bfloat16")
    assert config.tied_embeddings
    assert config.quantization is None


@pytest.mark.parametrize(
    "made",
    [
        LlamaConfig(hidden_size=64, num_attention_heads=4, intermediate_size=96),
        Qwen2Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2),
        Gemma3TextConfig(hidden_size=64, num_attention_heads=4, head_dim=32),
        GPT2Config(n_embd=64, n_head=4, n_layer=3, vocab_size=77),
    ],
    ids=lambda made: made.model_type,
)
def test_agrees_with_transformers(made: object, tmp_path: Path) -> None:
    made.save_pretrained(tmp_path)
    config, theirs = read_config(tmp_path), AutoConfig.from_pretrained(tmp_path)
    assert config.model_type == theirs.model_type
    assert config.num_layers == theirs.num_hidden_layers
    assert config.hidden_size == theirs.hidden_size
    assert config.num_heads == theirs.num_attention_heads
    assert config.vocab_size == theirs.vocab_size
    assert config.tied_embeddings == theirs.tie_word_embeddings
    assert config.max_positions == theirs.max_position_embeddings


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma", "qwen2", "cohere"])
def test_silence_about_a_tied_head_means_the_family_default(kind: str, tmp_path: Path) -> None:
    raw = {**LLAMA, "model_type": kind}
    del raw["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert read_config(tmp_path).tied_embeddings == theirs.tie_word_embeddings


def test_text_model_of_a_multimodal_config(tmp_path: Path) -> None:
    raw = {"architectures": ["Some"], "model_type": "gemma3", "text_config": LLAMA}
    config = parse_config(raw, tmp_path)
    assert (config.architecture, config.model_type, config.num_layers) == ("Some", "llama", 3)
    assert untied(raw)["text_config"]["tie_word_embeddings"] is False


def test_window_counts_only_when_it_is_used(tmp_path: Path) -> None:
    raw = {**LLAMA, "sliding_window": 128}
    assert parse_config(raw, tmp_path).sliding_window == 128
    off = {**raw, "use_sliding_window": False}
    assert parse_config(off, tmp_path).sliding_window is None


def test_rope_figures_at_top_level() -> None:
    llama3 = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5}
    changed = with_rope_keys({"rope_parameters": llama3})
    assert changed["rope_theta"] == 5e5
    assert changed["rope_scaling"] == {"rope_type": "llama3", "factor": 8.0}
    plain = with_rope_keys({"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}})
    assert plain["rope_theta"] == 1e5
    assert "rope_scaling" not in plain


def test_what_is_no_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        read_config(tmp_path)
    for content in ("{", "[]"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ModelError, match="JSON"):
            read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ModelError, match="has no num_hidden_layers"):
        read_config(tmp_path)
    with pytest.raises(ModelError, match=r"has no config\.json"):
        read_config(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_attention_heads", 0), ("vocab_size", -1), ("head_dim", "64"), ("head_dim", -1)],
)
def test_figures_that_are_no_counts(key: str, value: object) -> None:
    counts = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    with pytest.raises(ModelError, match=key):
        parse_config({**dict.fromkeys(counts, 8), key: value}, Path("model"))
