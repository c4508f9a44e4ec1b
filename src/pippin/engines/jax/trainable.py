"""The trainable tensors: stacked for compiled code, under checkpoint names for everybody else."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pippin.engines import Weights
from pippin.engines.jax.architecture import Spec
from pippin.engines.jax.load import TOP, layer_name, names, top_shapes
from pippin.engines.jax.lora import stack_pairs


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainable:
    """Which tensors are trained, by checkpoint name; `full` is all of them."""

    spec: Spec
    shapes: Mapping[str, tuple[int, ...]]
    full: bool

    def names(self, tree: Any) -> Weights:
        """Stacked arrays by checkpoint name, copied to the host in float32."""
        host = jax.tree.map(np.asarray, tree)
        places = ((name, shape, self._find(host, name)) for name, shape in self.shapes.items())
        return {
            name: array[tuple(slice(n) for n in shape)].astype(np.float32)
            for name, shape, array in places
        }

    def tree(self, weights: Weights) -> Any:
        """The inverse of `names`, on the host."""
        if not self.full:
            return stack_pairs(self.spec, weights)
        layers = {
            name: np.stack([weights[layer_name(n, name)] for n in range(self.spec.num_layers)])
            for name in self.spec.shapes()
        }
        return {**{key: weights[TOP[key]] for key in top_shapes(self.spec)}, "layers": layers}

    def moved(self, flags: Any) -> set[str]:
        """The names of tensors of which anything moved: `flags` tells it by entry of a stack."""
        host = jax.tree.map(np.asarray, flags)
        return {name for name in self.shapes if self._find(host, name).any()}

    def _find(self, tree: Any, name: str) -> Any:
        """The entry of the stacked arrays that has this name."""
        if name in TOP.values():
            return tree[next(key for key, top in TOP.items() if top == name)]
        number, _, inner = name.removeprefix("model.layers.").partition(".")
        if self.full:
            return tree["layers"][inner][int(number)]
        linear, _, side = inner.removesuffix(".weight").rpartition(".lora_")
        return tree[linear][side][int(number)]


def all_weights(spec: Spec) -> Trainable:
    """Every weight once, a tied head under the embedding's name."""
    return Trainable(spec=spec, shapes=dict(names(spec)), full=True)


def adapter_weights(spec: Spec, weights: Weights) -> Trainable:
    """The pairs of an adapter."""
    shapes = {name: array.shape for name, array in weights.items()}
    return Trainable(spec=spec, shapes=shapes, full=False)
