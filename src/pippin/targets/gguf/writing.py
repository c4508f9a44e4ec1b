"""Quantized folder to GGUF bundle: one tensor at a time, then read back and compared.

Shape letters: C head channels.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from pippin.errors import ModelError
from pippin.events import Event, Progress
from pippin.figures import counted
from pippin.model.tokenizer import Tokenizer, load_tokenizer
from pippin.targets import Bundle
from pippin.targets.bundle import (
    copy_side_files,
    describe,
    finish,
    generation_defaults,
    notice,
    require_context,
)
from pippin.targets.gate import Limits, gate
from pippin.targets.gguf import llama_cpp, ollama, reading
from pippin.targets.gguf.constraint import refuse_model
from pippin.targets.gguf.encoding import Encoder, Entry
from pippin.targets.gguf.guide import guide
from pippin.targets.gguf.metadata import add_figures, rope_factors
from pippin.targets.gguf.tensors import ROPE_FACTORS, architecture
from pippin.targets.gguf.vocabulary import add_vocabulary

# llama.cpp rounds what goes into a matrix to 8 bits: on SmolLM2 that alone is a KL of 0.004 to
# 0.007 and a top-1 of 0.94, on networks of random weights 0.03 and 0.87.
LIMITS = Limits(target="gguf", max_kl=0.1, min_top1=0.8)
# llama.cpp names its mixtures of K types, of which the small ones have one type for all linears.
_FILE_TYPES = {
    "F32": "ALL_F32",
    "Q3_K": "MOSTLY_Q3_K_S",
    "Q4_K": "MOSTLY_Q4_K_S",
    "Q5_K": "MOSTLY_Q5_K_S",
}


def write(bundle: Bundle) -> Iterator[Event]:
    """Fill `bundle.folder`, which exists; events carry stage `deploy`.

    Raises ModelError for a model, codes or a tokenizer that GGUF cannot hold, and PippinError where
    the written file gives other tensors or other tokens than the quantized folder.
    """
    for refusal in refuse_model(bundle.quantized):
        raise ModelError(*refusal)
    require_context(bundle)
    tokenizer, encoder = load_tokenizer(bundle.quantized), Encoder(bundle.quantized)
    found = encoder.entries()
    yield from (notice("gguf", text) for text in _widened(found))
    path = bundle.folder / reading.FILE
    for done, _ in enumerate(_write_file(path, encoder, tokenizer, found), 1):
        yield Progress(stage="deploy", done=done, values={})
    check: dict[str, Any] = {"types": dict(Counter(entry.kind for entry in found))}
    check["equal_tensors"] = reading.require_equal_tensors(path, encoder.view)
    check |= reading.require_equal_tokens(path, tokenizer)
    copy_side_files(bundle)
    yield from _write_modelfile(bundle, tokenizer)
    if llama_cpp.is_installed():
        check |= yield from gate(
            bundle, tokenizer, LIMITS, lambda: llama_cpp.LlamaCppModel(path, bundle.context)
        )
    else:
        yield notice("gguf", "llama-cpp-python is not installed: the file was read, not run")
    description = describe(bundle, "gguf", tokenizer, {reading.FILE: "weights and tokenizer"})
    finish(bundle, description | {"runtime": reading.runtime(), "check": check}, guide)


def _write_modelfile(bundle: Bundle, tokenizer: Tokenizer) -> Iterator[Event]:
    defaults = generation_defaults(bundle)
    text = ollama.modelfile(reading.FILE, tokenizer, bundle.context, defaults)
    if text is None:
        why = "the chat template is more than texts around turns, and Ollama runs no Jinja"
        yield notice("gguf", f"no {ollama.FILE}: {why}")
        return
    (bundle.folder / ollama.FILE).write_text(text, "utf-8")


def _write_file(
    path: Path, encoder: Encoder, tokenizer: Tokenizer, found: list[Entry]
) -> Iterator[Entry]:
    """Each entry when it is written: the header says where all are, then they follow in turn."""
    config = encoder.view.config
    writer = gguf.GGUFWriter(path, architecture(config))
    try:
        add_figures(writer, config, _file_type(found))
        add_vocabulary(writer, tokenizer, config.vocab_size)
        for entry in found:
            size = int(np.prod(entry.byte_shape))
            writer.add_tensor_info(
                entry.place.name, entry.byte_shape, np.dtype(np.uint8), size, entry.type
            )
        factors_C = rope_factors(config)
        if factors_C is not None:
            writer.add_tensor_info(ROPE_FACTORS, factors_C.shape, factors_C.dtype, factors_C.nbytes)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for entry in found:
            writer.write_tensor_data(encoder.encode(entry))
            yield entry
        if factors_C is not None:
            writer.write_tensor_data(factors_C)
    finally:
        writer.close()


def _file_type(found: list[Entry]) -> gguf.LlamaFileType:
    """llama.cpp's name for a file whose matrices are mostly of one type."""
    kinds = Counter(entry.kind for entry in found if len(entry.shape) == 2)
    most = kinds.most_common(1)[0][0]
    return gguf.LlamaFileType[_FILE_TYPES.get(most, f"MOSTLY_{most}")]


def _widened(found: list[Entry]) -> Iterator[str]:
    """What takes more bits in the file than in the folder, in words."""
    for bits in (2, 3, 6):
        kinds = [e.kind for e in found if e.bits == bits and not e.kind.endswith("_K")]
        if kinds:
            tensors = counted(len(kinds), "tensor")
            yield f"{tensors} of {bits} bits stored as {kinds[0]}, without loss"
