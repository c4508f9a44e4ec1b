"""A written GGUF file read back: as tensors, as tokens, and as a model in PyTorch."""

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray

from pippin.engines import Scorer, load_engine
from pippin.errors import PippinError
from pippin.model.config import (
    ModelConfig,
    read_config,
    read_raw,
    with_dtype,
    without_quantization,
    write_raw,
)
from pippin.model.quantized import DenseView
from pippin.model.tokenizer import Tokenizer
from pippin.model.weights import Spec, Writer
from pippin.targets.bundle import corpus, read_description
from pippin.targets.gguf import llama_cpp
from pippin.targets.gguf.tensors import places
from pippin.targets.soundness import expected_shapes

FILE = "model.gguf"
REREAD = "its tensors, read back and dequantized, in PyTorch: llama.cpp itself was not run"
_FAULT = "use the version of gguf that pippin names"


def load(folder: Path) -> Scorer:
    """The file in what it was judged in: llama.cpp, or its own tensors in float32 in PyTorch.

    Raises ModelError for an incomplete bundle, or where llama.cpp is missing now.
    """
    description = read_description(folder)
    if description["runtime"] == llama_cpp.RUNTIME:
        return llama_cpp.LlamaCppModel(folder / FILE, description["context"])
    return load_tensors(folder)


def load_tensors(folder: Path) -> Scorer:
    """The file's own tensors in float32 in PyTorch."""
    with tempfile.TemporaryDirectory() as place:
        write_dense(folder, Path(place))
        return load_engine("torch", "cpu").load(Path(place), "float32")


def runtime() -> str:
    """What judges a file here."""
    return llama_cpp.RUNTIME if llama_cpp.is_installed() else REREAD


def write_dense(bundle: Path, folder: Path) -> None:
    """The bundle's file as a Hugging Face folder in float32."""
    config = read_config(bundle)
    write_raw(folder, with_dtype(without_quantization(read_raw(bundle)), "float32"))
    specs = {
        name: Spec(shape=shape, dtype=np.dtype(np.float32))
        for name, shape in expected_shapes(folder, config).items()
    }
    with Writer(folder, specs) as writer:
        for name, values in read_values(bundle / FILE, config, specs):
            writer.write(name, values.reshape(specs[name].shape))


def read_values(
    path: Path, config: ModelConfig, names: Iterable[str]
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Weights by the folder's names, dequantized by the gguf package, as transformers has them."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name, place in places(config, names).items():
        tensor = tensors[place.name]
        values = dequantize(tensor.data, tensor.tensor_type) - np.float32(place.shift)
        if place.order_O is not None:
            ordered = np.empty_like(values)
            ordered[place.order_O] = values
            values = ordered
        yield name, values


def require_equal_tensors(path: Path, view: DenseView) -> int:
    """How many tensors were compared: all. Raises PippinError for one that differs in a bit."""
    shifts = {name: np.float32(p.shift) for name, p in places(view.config, view.tensors).items()}
    for name, values in read_values(path, view.config, view.tensors):
        expected = view.read(name).astype(np.float32) + shifts[name] - shifts[name]
        if not np.array_equal(values, expected):
            raise PippinError(f"gguf: {path.name} gives other values of {name}", _FAULT)
    return len(shifts)


def require_equal_tokens(path: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Compare tokens over a corpus with those of llama.cpp, or of transformers where it is missing.

    Both read the file; the result says which did. Raises PippinError for a text that differs.
    """
    texts = corpus(tokenizer)
    reader, found = _tokenized(path, texts)
    for text, given, ids in zip(texts, found, tokenizer.encode_many(texts), strict=True):
        if list(given) != ids:
            raise PippinError(
                f"gguf: {reader} cuts {text!r} of the written file into {given}, not {ids}",
                "its tokenizer is not one that GGUF can describe: deploy to another target",
            )
    return {"equal_texts": len(texts), "tokenizer": reader}


def _tokenized(path: Path, texts: list[str]) -> tuple[str, list[list[int]]]:
    if llama_cpp.is_installed():
        model = llama_cpp.open_llama(path, vocab_only=True)
        encoded = (text.encode() for text in texts)
        found = [model.tokenize(text, add_bos=False, special=True) for text in encoded]
        model.close()
        return "llama.cpp", found
    from transformers import AutoTokenizer

    backend: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return "transformers", backend(texts, add_special_tokens=False)["input_ids"]
