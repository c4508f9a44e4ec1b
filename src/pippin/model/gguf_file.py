"""A GGUF file turned into a Hugging Face folder, tensor by tensor, without a framework.

Shape letters: O output features, I input features.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pippin.errors import ModelError
from pippin.model import names
from pippin.model.config import write_raw
from pippin.model.gguf_contents import Stored, read_contents
from pippin.model.weights import Spec, Writer, row_chunks

_CHUNK_BYTES = 32 << 20
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# Architectures whose tensors are the llama family's: the transformers class, and whether the
# converter interleaved the rows of q and k for rotary embeddings.
_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama", True),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", False),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", False),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufFile:
    """An open GGUF file: its metadata, and its tensors still as they are stored."""

    path: Path
    arch: str
    fields: dict[str, Any]
    tensors: dict[str, Stored]

    def figure(self, key: str, default: Any = None) -> Any:
        """A figure of the architecture's table."""
        value = self.fields.get(f"{self.arch}.{key}", default)
        if value is None:
            raise ModelError(f"{self.path} does not say {self.arch}.{key}", "take another file")
        return value


def open_gguf(path: Path) -> GgufFile:
    """Raises ModelError for what is no GGUF file, was cut off, or cannot be converted."""
    try:
        fields, tensors = read_contents(path)
    except ValueError as error:
        raise ModelError(
            f"{path} cannot be read as GGUF: {error}", "the file was cut off, or is something else"
        ) from error
    arch = fields.get("general.architecture", "")
    if arch not in _ARCHITECTURES:
        raise ModelError(
            f"{path} is a {arch or 'nameless'} model, and not {', '.join(_ARCHITECTURES)}",
            "give the model's safetensors folder or hub id",
        )
    file = GgufFile(path=path, arch=arch, fields=fields, tensors=tensors)
    _refuse_unknown(file)
    return file


def convert(file: GgufFile, folder: Path) -> Iterator[str]:
    """Write the folder, weights in bfloat16. Yields the name of each tensor that is written."""
    write_raw(folder, make_config(file))
    _write_tokenizer(file, folder)
    specs = {_target(file, name): _spec(tensor) for name, tensor in file.tensors.items()}
    with Writer(folder, specs) as writer:
        for source in file.tensors:
            target = _target(file, source)
            for start, rows in _row_chunks(file, source):
                writer.write_rows(target, start, rows.astype(_BFLOAT16))
            yield target


def make_config(file: GgufFile) -> dict[str, Any]:
    """config.json of the model, rope's theta under the old and the new spelling."""
    architecture, model_type, _ = _ARCHITECTURES[file.arch]
    heads, hidden = file.figure("attention.head_count"), file.figure("embedding_length")
    theta = float(file.figure("rope.freq_base", 10000.0))
    ids = {
        f"{n}_token_id": _token_id(file, g)
        for n, g in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": int(file.tensors["token_embd.weight"].shape[0]),
        "hidden_size": hidden,
        "intermediate_size": file.figure("feed_forward_length"),
        "num_hidden_layers": file.figure("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.figure("attention.head_count_kv", heads),
        "head_dim": file.figure("attention.key_length", hidden // heads),
        "hidden_act": "silu",
        "max_position_embeddings": file.figure("context_length"),
        "rms_norm_eps": float(np.float32(file.figure("attention.layer_norm_rms_epsilon"))),
        "rope_theta": theta,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        **{key: value for key, value in ids.items() if value is not None},
    }


def _refuse_unknown(file: GgufFile) -> None:
    scaling = file.fields.get(f"{file.arch}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in file.tensors:
        raise ModelError(
            f"{file.path} scales its rotary embedding (type {scaling})",
            "a GGUF file does not hold all of its figures: give the safetensors folder or hub id",
        )
    for name in file.tensors:
        if names.from_gguf(name) is None:
            raise ModelError(
                f"{file.path} holds {name}, which pippin does not know in a {file.arch} model",
                "give the model's safetensors folder or hub id",
            )


def _target(file: GgufFile, source: str) -> str:
    target = names.from_gguf(source)
    assert target is not None, (file.path, source)
    return target


def _spec(tensor: Stored) -> Spec:
    return Spec(shape=tensor.shape, dtype=_BFLOAT16)


def _row_chunks(file: GgufFile, source: str) -> Iterator[tuple[int, NDArray[np.float32]]]:
    from gguf.quants import dequantize

    tensor = file.tensors[source]
    spec = _spec(tensor)
    order = _row_order(file, source, spec.shape[0])
    for start, stop in row_chunks(spec, _CHUNK_BYTES):
        rows = tensor.data[start:stop] if order is None else tensor.data[order[start:stop]]
        yield start, dequantize(rows, tensor.tensor_type).reshape(-1, *spec.shape[1:])


def _row_order(file: GgufFile, source: str, rows: int) -> NDArray[np.intp] | None:
    """llama.cpp interleaves the two halves of every q and k head; this undoes it."""
    part = source.split(".")[-2]
    if not _ARCHITECTURES[file.arch][2] or part not in ("attn_q", "attn_k"):
        return None
    heads = file.figure("attention.head_count")
    if part == "attn_k":
        heads = file.figure("attention.head_count_kv", heads)
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def _token_id(file: GgufFile, name: str) -> int | None:
    value = file.fields.get(f"tokenizer.ggml.{name}_token_id")
    return None if value is None else int(value)


def _write_tokenizer(file: GgufFile, folder: Path) -> None:
    from transformers import GenerationConfig, PreTrainedTokenizerFast

    source = file.path.name
    try:
        # AutoTokenizer reads the file for seconds to choose a class; the tokenizer is the same.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(file.path.parent, gguf_file=source)
    except ImportError as error:
        raise ModelError(
            "transformers reads the tokenizer of a GGUF file only where torch is installed",
            "pip install 'pippin[torch]'",
        ) from error
    tokenizer.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=_token_id(file, "bos"),
        eos_token_id=_token_id(file, "eos"),
        pad_token_id=_token_id(file, "padding"),
    ).save_pretrained(folder)
