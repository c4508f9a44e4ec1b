"""Gradient checkpointing of all decoder layers, or of the first of them."""

import math
from typing import Any

from transformers import PreTrainedModel

from pippin.engines.torch.trial import decoder_layers
from pippin.errors import ModelError


def checkpoint_activations(network: PreTrainedModel, share: float = 1.0) -> None:
    """Activations inside the first layers, a `share` of all, are recomputed in the backward.

    Those of the last layers are kept: they are gone again when the first layers' are made. Raises
    ModelError where a share is asked of a network whose layers are in no list.
    """
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable = next(getattr(network, name) for name in names if hasattr(network, name))
    enable({"use_reentrant": False})
    layers = decoder_layers(network)
    if share < 1 and not layers:
        raise ModelError(
            f"{type(network).__name__} has no list of decoder layers to take a share of",
            "leave train.recomputed_layers out: all are recomputed",
        )
    kept = layers[math.ceil(share * len(layers)) :]
    modules: list[Any] = [module for layer in kept for module in layer.modules()]
    for module in modules:
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = False
