"""Frozen weights that float32 computes with, kept in bfloat16 where that holds them exactly.

A CPU multiplies in float32, and most checkpoints are bfloat16: widening a weight when its turn
comes takes a fifteenth of the product's time, forward and backward, and spares half its memory.

Shape letters: I inputs, O outputs.
"""

from typing import Any

import mlx.core as mx
from mlx import nn


class NarrowLinear(nn.Linear):
    """y = x W^T + bias in x's dtype; `weight` (O, I) is kept in a narrower one."""

    def __call__(self, x: mx.array) -> mx.array:
        """(..., I) -> (..., O)."""
        y = widened_product(x, self.weight)
        return y if "bias" not in self else y + self.bias


def widened_product(x: mx.array, weight_OI: mx.array) -> mx.array:
    """x W^T. The wide weight lives for a product: the backward widens it again."""

    @mx.custom_function
    def product(x: mx.array) -> mx.array:
        return x @ weight_OI.astype(x.dtype).T

    @product.vjp
    def backward(primals: Any, cotangent: mx.array, output: Any) -> mx.array:
        del primals, output
        return cotangent @ weight_OI.astype(cotangent.dtype)

    made: Any = product(x)
    return made


def keep_narrow(network: nn.Module) -> None:
    """Let the layers' linears keep float32 weights in bfloat16, one after the other."""
    layers: Any = network.layers
    for module in (m for layer in layers for m in layer.modules()):
        if type(module) is nn.Linear and module.weight.dtype == mx.float32:
            narrow = module.weight.astype(mx.bfloat16)
            if mx.array_equal(narrow.astype(mx.float32), module.weight):
                module.weight = narrow
                module.__class__ = NarrowLinear
