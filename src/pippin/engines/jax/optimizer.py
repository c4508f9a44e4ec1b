"""AdamW on float32 masters: clipped, refused where not finite, watched until weights have moved."""

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import Array

from pippin.recipe import Train

Tree: TypeAlias = Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam:
    """The recipe's figures, hashable: compiled code is specialised on them."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_grad_norm: float

    @classmethod
    def of(cls, train: Train) -> "Adam":
        """Those of a recipe."""
        return cls(**{name: getattr(train, name) for name in cls.__dataclass_fields__})

    def rule(self) -> optax.GradientTransformation:
        """Everything of AdamW but the learning rate."""
        return optax.chain(
            optax.scale_by_adam(self.beta1, self.beta2, self.eps),
            optax.add_decayed_weights(self.weight_decay),
        )


class Masters(NamedTuple):
    """The trainable tensors in float32 and the optimizer's moments."""

    weights: Tree
    moments: Tree


def first_masters(adam: Adam, weights: Tree) -> Masters:
    """Moments of zero; a copy of the weights, which updates overwrite.

    All are committed to the weights' device, as updates leave them: the step is compiled once.
    """
    device = jax.tree.leaves(weights)[0].sharding
    masters = jax.tree.map(lambda w: jnp.array(w, jnp.float32), weights)
    return jax.device_put(Masters(masters, adam.rule().init(masters)), device)


def update(
    adam: Adam, masters: Masters, sums: tuple[Array, Tree], tokens: Array, learning_rate: Array
) -> tuple[Masters, Array, Tree]:
    """One update with the mean gradient over `tokens`; none where loss or gradient is not finite.

    `sums` are loss and gradient, summed. Returns the masters, the mean gradient's norm, and by
    stack which of its entries (layers, rows) moved.
    """
    loss, grads = sums
    norm = optax.tree.norm(grads) / tokens
    factor = jnp.float32(1.0)
    if adam.max_grad_norm:
        factor = jnp.minimum(factor, adam.max_grad_norm / (norm + 1e-6))
    grads = jax.tree.map(lambda g: g * (factor / tokens), grads)
    directions, moments = adam.rule().update(grads, masters.moments, masters.weights)
    weights = jax.tree.map(lambda w, d: w - learning_rate * d, masters.weights, directions)
    good = jnp.isfinite(loss) & jnp.isfinite(norm)
    new = jax.tree.map(lambda a, b: jnp.where(good, a, b), Masters(weights, moments), masters)
    return new, norm, jax.tree.map(_moved, new.weights, masters.weights)


def _moved(after: Array, before: Array) -> Array:
    return (after != before).reshape(len(after), -1).any(1)
