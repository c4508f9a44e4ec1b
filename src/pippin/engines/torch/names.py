"""The trainable tensors of a network under the names its checkpoint gives them."""

from pathlib import Path

from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from pippin.engines import Weights
from pippin.engines.arrays import adapted
from pippin.engines.torch.adapting import add_adapter
from pippin.errors import ModelError
from pippin.recipe import Lora


def lora_parameters(
    network: PreTrainedModel, lora: Lora, weights: Weights
) -> dict[str, nn.Parameter]:
    """Add the adapter's layers; the masters by name: `<linear>.lora_A.weight`, lora_B, DoRA's."""
    scale = dict.fromkeys(adapted(weights), lora.scale)
    layers = add_adapter(network, weights, scale, lora.dropout)
    return {key: layers[key.rpartition(".lora_")[0]].master(key) for key in weights}


def full_parameters(network: PreTrainedModel, checkpoint: Path) -> dict[str, nn.Parameter]:
    """Every weight once, tied ones under the first name.

    Raises ModelError where transformers renames or fuses tensors while loading: what would be
    trained could not be written back under the checkpoint's names.
    """
    parameters = dict(network.named_parameters())
    stored = _stored_names(checkpoint)
    strange = sorted(set(parameters) - stored)
    if strange:
        raise ModelError(
            f"{checkpoint}: transformers loads {strange[0]} under another name than the checkpoint "
            f"({len(strange)} in all)",
            "set train.method = lora",
        )
    return parameters


def _stored_names(checkpoint: Path) -> set[str]:
    names: set[str] = set()
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            names.update(file.keys())
    return names
