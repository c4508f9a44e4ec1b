"""The adapter's linear: a frozen base, dense or quantized, plus a low-rank update.

Shape letters: I inputs, O outputs, R rank.
"""

from typing import Any

import mlx.core as mx
from mlx import nn

from pippin.engines import Weights
from pippin.engines.arrays import adapted, find_magnitude, find_pair
from pippin.engines.mlx.narrow import widened_product
from pippin.errors import ModelError

LINEARS = (nn.Linear, nn.QuantizedLinear)
TINY = 1.2e-38  # the least normal float32


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

    @property
    def drops(self) -> bool:
        """Whether some of the inputs are left out in training."""
        return self._dropout > 0

    def draw_from(self, key: mx.array | None) -> None:
        """Where the next forward pass takes its dropout mask from."""
        self._key = key

    def __call__(self, x: mx.array) -> mx.array:
        """(..., I) -> (..., O)."""
        return self.adapted(x, self.base(x))

    def adapted(self, x: mx.array, y: mx.array) -> mx.array:
        """The update of x added to y."""
        a_RI = self.lora_A.astype(x.dtype)
        b_OR = (self.lora_B * self._scale).astype(x.dtype)
        return mx.addmm(y, self._dropped(x) @ a_RI.T, b_OR.T)

    def _dropped(self, x: mx.array) -> mx.array:
        if self._key is None or not self._dropout:
            return x
        keep = 1.0 - self._dropout
        return x * mx.random.bernoulli(keep, x.shape, key=self._key).astype(x.dtype) * (1.0 / keep)


class DoraLinear(LoraLinear):
    """y = gain * (x W^T + scale * dropout(x) A^T B^T) + bias, gain = m / |W + scale B A|.

    `lora_magnitude_vector` m (O,) is float32. The norm is by row, and a constant to gradients
    (https://arxiv.org/abs/2402.09353, section 4.3).
    """

    def __init__(
        self,
        base: nn.Module,
        pair: tuple[mx.array, mx.array],
        scale: float,
        dropout: float,
        magnitude_O: mx.array,
    ):
        super().__init__(base, pair, scale, dropout)
        self.lora_magnitude_vector = magnitude_O
        weight_OI = _weight(base).astype(mx.float32)
        self._square_O = (weight_OI * weight_OI).sum(1)
        mx.eval(self._square_O)

    def __call__(self, x: mx.array) -> mx.array:
        """(..., I) -> (..., O), gained in float32: bfloat16 cannot tell 1.001 from 1."""
        gain_O = self.lora_magnitude_vector / mx.stop_gradient(self._norm(x.dtype))
        y = self.adapted(x, _product(self.base, x)) * gain_O
        bias: Any = self.base.get("bias")
        return (y if bias is None else y + bias).astype(x.dtype)

    def _norm(self, dtype: mx.Dtype) -> mx.array:
        """|W + sBA| by row, from |W|^2 + 2s B (A W^T) + s^2 (BA)(BA)^T: no copy of W is made."""
        b_OR = self.lora_B * self._scale
        cross_OR = _product(self.base, self.lora_A.astype(dtype)).T.astype(mx.float32)
        inner_OR = 2.0 * cross_OR + b_OR @ (self.lora_A @ self.lora_A.T)
        return mx.sqrt(mx.maximum(self._square_O + (b_OR * inner_OR).sum(1), TINY))


def add_adapter(
    network: nn.Module, weights: Weights, scale: dict[str, float], dropout: float
) -> dict[str, LoraLinear]:
    """Put a LoraLinear in the place of every linear that `weights` has a pair for.

    `weights` holds `<linear>.lora_A.weight` (R, I) and `<linear>.lora_B.weight` (O, R), DoRA's
    `<linear>.lora_magnitude_vector` (O,) besides; `scale` is by linear. Raises ModelError where the
    network has no such linear, or one of another shape.
    """
    modules: dict[str, Any] = dict(network.named_modules())
    layers = {}
    for name in adapted(weights):
        base = _find_linear(modules, name)
        layers[name] = _adapted(base, name, weights, scale[name], dropout)
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


def _adapted(base: Any, name: str, weights: Weights, scale: float, dropout: float) -> LoraLinear:
    inputs, outputs = linear_shape(base)
    pair = find_pair(weights, name, inputs, outputs)
    magnitude_O = find_magnitude(weights, name, outputs)
    a_RI, b_OR = (mx.array(array.astype("float32")) for array in pair)
    if magnitude_O is None:
        return LoraLinear(base, (a_RI, b_OR), scale, dropout)
    return DoraLinear(base, (a_RI, b_OR), scale, dropout, mx.array(magnitude_O.astype("float32")))


def _product(base: Any, x: mx.array) -> mx.array:
    """x W^T, without the bias."""
    if "scales" not in base:
        return widened_product(x, base.weight)
    rule = {"group_size": base.group_size, "bits": base.bits, "mode": base.mode}
    return mx.quantized_matmul(x, base.weight, base.scales, base.get("biases"), **rule)


def _weight(base: Any) -> mx.array:
    """W (O, I), dense."""
    if "scales" not in base:
        return base.weight
    rule = {"group_size": base.group_size, "bits": base.bits, "mode": base.mode}
    return mx.dequantize(base.weight, base.scales, base.get("biases"), **rule)
