"""Adapters put into a network: each linear that has a pair becomes one that adds it.

Shape letters: I inputs, O outputs, R rank, V vocabulary, D hidden size.
"""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pippin.engines import Weights
from pippin.engines.arrays import adapted, find_magnitude, find_pair
from pippin.engines.torch.dora import DoraLinear
from pippin.engines.torch.lora import Frozen, LoraLinear
from pippin.engines.torch.packed import PackedLinear
from pippin.errors import ModelError


def add_adapter(
    network: nn.Module, weights: Weights, scale: dict[str, float], dropout: float
) -> dict[str, LoraLinear]:
    """Put a LoraLinear in the place of every linear that `weights` has a pair for.

    `weights` holds `<linear>.lora_A.weight` (R, I) and `<linear>.lora_B.weight` (O, R), DoRA's
    `<linear>.lora_magnitude_vector` (O,) besides; `scale` is by linear. Raises ModelError where the
    network has no such linear, or one of another shape.
    """
    layers = {}
    for name in adapted(weights):
        base = _find_linear(network, name)
        layer = _adapted(base, name, weights, scale[name], dropout)
        layers[name] = layer.train(network.training)
        parent, _, child = name.rpartition(".")
        setattr(network.get_submodule(parent), child, layers[name])
    return layers


def add_to_embedding(
    network: nn.Module, name: str, scale: float, b_VR: NDArray[Any], a_RD: NDArray[Any]
) -> None:
    """Add a saved update to an embedding's rows. A head that is tied to it keeps the old ones.

    Raises ModelError where the network has no such embedding, or one of another shape.
    """
    module = _submodule(network, name)
    weight_VD = getattr(module, "weight", None)
    shape = (b_VR.shape[0], a_RD.shape[1])
    if not isinstance(module, nn.Embedding) or module.weight.shape != shape:
        found = None if weight_VD is None else tuple(weight_VD.shape)
        raise ModelError(
            f"the adapter wants an embedding {name} of {shape}, the model has {found}",
            "the adapter was trained on another base; name its base as model.source",
        )
    exact = torch.promote_types(module.weight.dtype, torch.float32)
    b, a = (torch.from_numpy(half).to(module.weight.device, exact) for half in (b_VR, a_RD))
    summed_VD = (module.weight.to(exact) + scale * b @ a).to(module.weight.dtype)
    module.weight = nn.Parameter(summed_VD, requires_grad=False)


def _find_linear(network: nn.Module, name: str) -> Frozen:
    module = _submodule(network, name)
    if isinstance(module, Conv1D):
        return _as_linear(module)
    if not isinstance(module, Frozen):
        raise ModelError(
            f"the adapter wants {name}, which is a {type(module).__name__}, not a linear",
            'name linears in lora.targets, or set train.method = "full"; an adapter that is there '
            "can be merged with `pippin merge`",
        )
    return module


def _as_linear(module: Conv1D) -> nn.Linear:
    """GPT-2's linear, which keeps its weight transposed: the same memory, seen as (O, I)."""
    inputs, outputs = module.weight.shape
    linear = nn.Linear(inputs, outputs, device="meta")
    linear.weight, linear.bias = nn.Parameter(module.weight.data.T), module.bias
    return linear.requires_grad_(False)


def _submodule(network: nn.Module, name: str) -> nn.Module:
    try:
        return network.get_submodule(name)
    except AttributeError as error:
        raise ModelError(
            f"the adapter wants {name}, the model has no such layer",
            "the adapter was trained on another base; name its base as model.source",
        ) from error


def _adapted(base: Frozen, name: str, weights: Weights, scale: float, dropout: float) -> LoraLinear:
    pair = find_pair(weights, name, base.in_features, base.out_features)
    magnitude_O = find_magnitude(weights, name, base.out_features)
    a_RI, b_OR = (_master(base, array) for array in pair)
    if magnitude_O is None:
        return LoraLinear(base, (a_RI, b_OR), scale, dropout)
    return DoraLinear(base, (a_RI, b_OR), scale, dropout, _master(base, magnitude_O))


def _master(base: Frozen, array: NDArray[Any]) -> Tensor:
    packed = isinstance(base, PackedLinear)
    exact = torch.float32 if packed else torch.promote_types(base.weight.dtype, torch.float32)
    device = base.device if packed else base.weight.device
    return torch.tensor(array.astype("float64"), dtype=exact).to(device)
