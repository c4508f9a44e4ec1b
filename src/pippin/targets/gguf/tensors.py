"""Names, row orders and shifts of GGUF's architectures; the names are the gguf package's own.

Shape letters: O outputs.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from pippin.errors import ModelError
from pippin.model import names
from pippin.model.config import ModelConfig

# model type -> GGUF's architecture
ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a tensor goes: its name in the file, the order of its rows, what is added to it."""

    name: str
    order_O: NDArray[np.intp] | None
    shift: float


def architecture(config: ModelConfig) -> str:
    """GGUF's name of the architecture, which constraint.py has asked for."""
    return ARCHITECTURES[config.model_type]


def places(config: ModelConfig, tensors: Iterable[str]) -> dict[str, Place]:
    """The place of every tensor of a dense model. Raises ModelError for a name GGUF lacks."""
    arch: Any = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture(config))
    table = gguf.get_tensor_name_map(arch, config.num_layers)
    return {name: _place(config, table, name) for name in tensors}


def _place(config: ModelConfig, table: Any, name: str) -> Place:
    found = table.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise ModelError(
            f"gguf: architecture {architecture(config)} has no tensor {name}",
            "deploy to another target",
        )
    # Gemma's norms multiply by one plus their weight; the file has the sum.
    shifted = config.model_type.startswith("gemma") and name.endswith("norm.weight")
    return Place(name=found, order_O=_order(config, name), shift=1.0 if shifted else 0.0)


def _order(config: ModelConfig, name: str) -> NDArray[np.intp] | None:
    """llama.cpp rotates neighbours where transformers rotates halves: heads are interleaved."""
    last = names.last(name.rpartition(".")[0])
    if architecture(config) != "llama" or last not in ("q_proj", "k_proj"):
        return None
    heads = config.num_heads if last == "q_proj" else config.num_kv_heads
    rows_O = np.arange(heads * config.head_dim)
    return rows_O.reshape(heads, 2, config.head_dim // 2).swapaxes(1, 2).reshape(-1)
