"""The adapter's linear: a frozen base, dense or quantized, plus a low-rank update.

Shape letters: I inputs, O outputs, R rank.
"""

from typing import Any

import mlx.core as mx
from mlx import nn

from pippin.engines import Weights
from pippin.engines.arrays import adapted, find_pair
from pippin.errors import ModelError

LINEARS = (nn.Linear, nn.QuantizedLinear)


class LoraLinear(nn.Module):
    """y = base(x) + scale * dropout(x) A^T B^T.

    `lora_A` (R, I) and `lora_B` (O, R) are float32; products run in x's dtype. Dropout is off while
    `key`, its source of randomness, is None.
    """

    def __init__(
        self, base: nn.Module, pair: tuple[mx.array, mx.array], scale: float, dropout: float
    ):
        super().__init__()
        self.base = base
        self.lora_A, self.lora_B = pair
        self._scale, self._dropout = scale, dropout
        self._key: mx.array | None = None

    def draw_from(self, key: mx.array | None) -> None:
        """Where the next forward pass takes its dropout mask from."""
        self._key = key

    def __call__(self, x: mx.array) -> mx.array:
        a_RI = self.lora_A.astype(x.dtype)
        b_OR = (self.lora_B * self._scale).astype(x.dtype)
        return mx.addmm(self.base(x), self._dropped(x) @ a_RI.T, b_OR.T)

    def _dropped(self, x: mx.array) -> mx.array:
        if self._key is None or not self._dropout:
            return x
        keep = 1.0 - self._dropout
        return x * mx.random.bernoulli(keep, x.shape, key=self._key).astype(x.dtype) * (1.0 / keep)


def add_adapter(
    network: nn.Module, weights: Weights, scale: dict[str, float], dropout: float
) -> dict[str, LoraLinear]:
    """Put a LoraLinear in the place of every linear that `weights` has a pair for.

    `weights` holds `<linear>.lora_A.weight` (R, I) and `<linear>.lora_B.weight` (O, R); `scale` is
    by linear. Raises ModelError where the network has no such linear, or one of another shape.
    """
    modules: dict[str, Any] = dict(network.named_modules())
    layers = {}
    for name in adapted(weights):
        base = _find_linear(modules, name)
        pair = _pair(base, name, weights)
        layers[name] = LoraLinear(base, pair, scale[name], dropout)
        parent, _, child = name.rpartition(".")
        setattr(modules[parent], child, layers[name])
    return layers


def linear_shape(linear: Any) -> tuple[int, int]:
    """(inputs, outputs) of a linear, dense or quantized."""
    outputs, inputs = linear.weight.shape
    return (inputs * 32 // linear.bits if "scales" in linear else inputs), outputs


def _find_linear(modules: dict[str, Any], name: str) -> Any:
    module = modules.get(name)
    if module is None:
        raise ModelError(
            f"the adapter wants {name}, the model in mlx-lm has no such layer",
            "name the adapter's own base as model.source; where it is that, mlx-lm names the "
            "layer differently: set model.engine = torch",
        )
    if not isinstance(module, LINEARS):
        raise ModelError(
            f"the adapter wants {name}, which is a {type(module).__name__}, not a linear",
            'name linears in lora.targets, set train.method = "full", or merge an adapter that is '
            "there with `pippin merge` or peft",
        )
    return module


def _pair(base: Any, name: str, weights: Weights) -> tuple[mx.array, mx.array]:
    a_RI, b_OR = find_pair(weights, name, *linear_shape(base))
    return mx.array(a_RI.astype("float32")), mx.array(b_OR.astype("float32"))
