"""The trainable tensors of a network under the names its checkpoint gives them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from pippin.engines import Weights
from pippin.engines.arrays import adapted
from pippin.engines.mlx.lora import add_adapter
from pippin.engines.mlx.narrow import keep_narrow
from pippin.errors import ModelError
from pippin.model.config import read_raw
from pippin.model.weights import Checkpoint
from pippin.recipe import Lora


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a trainable tensor lives in the network."""

    module: Any
    attribute: str

    def get(self) -> mx.array:
        """The tensor as the network computes with it."""
        return self.module[self.attribute]

    def put(self, array: mx.array) -> None:
        """Let the network compute with another one."""
        self.module[self.attribute] = array


def lora_places(network: nn.Module, lora: Lora, weights: Weights) -> dict[str, Place]:
    """Add the adapter's layers; their tensors: `<linear>.lora_A.weight`, its lora_B, DoRA's.

    All else is frozen: a CPU keeps it in few bytes.
    """
    if mx.default_device() == mx.cpu:
        keep_narrow(network)
    scale = dict.fromkeys(adapted(weights), lora.scale)
    layers = add_adapter(network, weights, scale, lora.dropout)
    return {
        key: Place(
            module=layers[key.rpartition(".lora_")[0]],
            attribute=key.removesuffix(".weight").rpartition(".")[2],
        )
        for key in weights
    }


def full_places(network: nn.Module, checkpoint: Path) -> dict[str, Place]:
    """Every weight once, tied ones under the first name.

    Raises ModelError for a quantized folder, and where mlx-lm renames or fuses tensors while
    loading: what would be trained could not be written back under the checkpoint's names.
    """
    modules: dict[str, Any] = dict(network.named_modules())
    if "quantization" in read_raw(checkpoint):
        raise ModelError(
            f"{checkpoint} is quantized: its codes cannot be trained",
            "set train.method = lora, or start from the dense model",
        )
    names = [name for name, _ in tree_flatten(network.parameters())]
    strange = sorted(set(names) - set(Checkpoint(checkpoint).tensors))
    if strange:
        raise ModelError(
            f"{checkpoint}: mlx-lm loads {strange[0]} under another name than the checkpoint "
            f"({len(strange)} in all)",
            "set train.method = lora",
        )
    network.unfreeze()
    places = {}
    for name in names:
        parent, _, child = name.rpartition(".")
        places[name] = Place(module=modules[parent], attribute=child)
    return places
