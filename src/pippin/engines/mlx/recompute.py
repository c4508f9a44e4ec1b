"""Gradient checkpointing: a decoder layer keeps its input and computes the rest again."""

import functools
from typing import Any

import mlx.core as mx
from mlx import nn


def recompute_layers(network: nn.Module) -> None:
    """From now on the layers' activations are made again in the backward pass."""
    layers: Any = network.layers
    for layer in layers:
        layer.__class__ = _recomputed(type(layer))


@functools.cache
def _recomputed(kind: Any) -> type:
    class Recomputed(kind):
        def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> Any:
            # What is differentiated must be an argument: the layer's own tensors as well.
            def inner(parameters: Any, hidden: mx.array) -> Any:
                self.update(parameters)
                return super(Recomputed, self).__call__(hidden, *args, **kwargs)

            return mx.checkpoint(inner)(self.trainable_parameters(), x)

    Recomputed.__name__ = Recomputed.__qualname__ = kind.__name__
    Recomputed.__module__ = kind.__module__
    return Recomputed
