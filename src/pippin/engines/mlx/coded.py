"""Linears of codes whose scales and zero points are trained: every forward is what is stored.

Shape letters: O outputs, I inputs, G groups.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from numpy.typing import NDArray

from pippin.engines import Weights
from pippin.engines.coded import Scales, by_tensor, read_coded, tuned
from pippin.engines.mlx.body import Loaded
from pippin.engines.mlx.names import Place
from pippin.engines.mlx.trainer import MlxTrainer
from pippin.model.quantized import DenseView
from pippin.recipe import Train


class CodedLinear(nn.Module):
    """y = x W^T + bias, W = code * scale + zero point; `moves_0` and `moves_1` move both."""

    def __init__(self, bias: mx.array | None, codes_OI: mx.array, scales: Scales) -> None:
        super().__init__()
        self._bias, self._codes_OI, self._scales = bias, codes_OI, scales
        self._dtype = getattr(mx, scales.dtype.name)
        self._first, self._added = (
            [mx.array(part) for part in parts] for parts in (scales.first, scales.added)
        )
        for part in scales.parts:
            self[f"moves_{part}"] = mx.zeros_like(self._first[0])

    def __call__(self, x: mx.array) -> mx.array:
        """(..., I) -> (..., O). The codes alone are kept: the backward makes the weight again."""
        y = mx.checkpoint(self._product)(x, *self.tuned())
        return y if self._bias is None else y + self._bias

    def tuned(self) -> tuple[mx.array, mx.array]:
        """Scales and biases (O, G) float32, as they would be stored."""
        moves = [self[f"moves_{part}"] for part in self._scales.parts]
        bits = self._scales.grid.bits
        return tuned(bits, self._first, self._added, moves, self._rounded)

    def stored(self) -> list[NDArray[Any]]:
        """Scales and biases that the forward computes with, as the layout has them."""
        return self._scales.stored([np.array(part) for part in self.tuned()])

    def _product(self, x: mx.array, scale_OG: mx.array, bias_OG: mx.array) -> mx.array:
        codes_OGS = self._codes_OI.reshape(*scale_OG.shape, -1).astype(mx.float32)
        weight_OGS = codes_OGS * scale_OG[..., None] + bias_OG[..., None]
        return x @ weight_OGS.flatten(1).astype(x.dtype).T

    def _rounded(self, values: mx.array, least: float | None) -> mx.array:
        return rounded(values if least is None else mx.maximum(values, least), self._dtype)


def rounded(values: mx.array, dtype: mx.Dtype) -> mx.array:
    """The nearest values of a dtype, in float32; the gradient of that is one."""

    @mx.custom_function
    def nearest(values: mx.array) -> mx.array:
        return values.astype(dtype).astype(mx.float32)

    @nearest.vjp
    def backward(primals: Any, cotangent: mx.array, output: Any) -> mx.array:
        del primals, output
        return cotangent

    made: Any = nearest(values)
    return made


def take_codes(network: nn.Module, view: DenseView, seed: int) -> dict[str, CodedLinear]:
    """Put a CodedLinear in the place of every quantized linear of the layers; them by name.

    Raises ModelError where the network has no such linear.
    """
    modules: dict[str, Any] = dict(network.named_modules())
    coded = {}
    for name, codes_OI, scales in read_coded(view, modules, seed, "mlx-lm"):
        coded[name] = CodedLinear(modules[name].get("bias"), mx.array(codes_OI), scales)
        parent, _, child = name.rpartition(".")
        setattr(modules[parent], child, coded[name])
    return coded


def move_places(coded: Mapping[str, CodedLinear]) -> dict[str, Place]:
    """Where what scales and biases have moved by lives."""
    return {
        f"{name}.{moves}": Place(module=linear, attribute=moves)
        for name, linear in coded.items()
        for moves in linear.parameters()
    }


def stored(coded: Mapping[str, CodedLinear]) -> Weights:
    """Scales and biases by tensor name, as the layout stores them."""
    return by_tensor({name: linear.stored() for name, linear in coded.items()})


class CodesTrainer(MlxTrainer):
    """Trains the scales and zero points of the codes that a network was loaded from."""

    def __init__(
        self, loaded: Loaded, coded: Mapping[str, CodedLinear], train: Train, seed: int
    ) -> None:
        self.coded = coded
        super().__init__(loaded, move_places(coded), train, seed)

    def weights(self) -> Weights:
        """Scales and biases as they are stored, widened to float32, under their tensors' names."""
        self._put(self.optimizer.masters)
        return {name: array.astype(np.float32) for name, array in stored(self.coded).items()}
