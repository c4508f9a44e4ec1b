"""Products with a layer's linears: weights dense, as the bits of bfloat16, or as codes.

Shape letters: L layers, O outputs, I inputs, P packed words, G groups, R rank.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

EXACT = lax.Precision.HIGHEST  # float32 products stay float32 on hardware that would round them
# XLA may leave out roundings to bfloat16 between operators; PyTorch rounds after each of them.
ROUNDS = {"xla_allow_excess_precision": False}
# What a layer may keep for its backward: a linear's sum, x A^T, DoRA's norms.
PRODUCT, NARROW, NORM = "product", "narrow", "norm"


class Pair(NamedTuple):
    """An adapter's matrices (..., R, I) and (..., O, R), B already scaled; DoRA's vector (..., O).

    The vector is not a number in a layer that has none.
    """

    a_RI: Array
    b_OR: Array
    magnitude_O: Array | None = None


Lora: TypeAlias = dict[str, Pair]  # by linear within a layer
Project: TypeAlias = Callable[[str, Array], Array]


class Codes(NamedTuple):
    """Quantized weights (..., O, I) in the layout of `model/quantized.py`: code * scale + bias."""

    packed_OP: Array
    scales_OG: Array
    biases_OG: Array


def linears(
    weights: dict[str, Any],
    lora: Lora,
    dropout: float = 0.0,
    key: Array | None = None,
    rounds: bool = False,
) -> Project:
    """gain * (x W^T + dropout(x) A^T B^T) + bias of one layer's linears, by name.

    `rounds` adds a bias to a sum in float32, as PyTorch does; a backward pass would be slow.
    """

    def project(name: str, x: Array) -> Array:
        weight_OI = dense(weights[f"{name}.weight"], x.shape[-1], x.dtype)
        bias_O = weights.get(f"{name}.bias")
        if rounds and bias_O is not None and name not in lora:
            return (exact_product(x, weight_OI.T) + bias_O).astype(x.dtype)
        y = jnp.matmul(x, weight_OI.T, precision=EXACT)
        if name in lora:
            drawn = None if key is None else jax.random.fold_in(key, sorted(lora).index(name))
            y = y + _low_rank(lora[name], x, dropout, drawn)
        y = checkpoint_name(y, PRODUCT)
        if name in lora:
            y = y * _gain(lora[name], weight_OI)
        if bias_O is not None:
            y = y + bias_O
        return y.astype(x.dtype)

    return project


def _low_rank(pair: Pair, x: Array, dropout: float, key: Array | None) -> Array:
    a_RI, b_OR = pair.a_RI.astype(x.dtype), pair.b_OR.astype(x.dtype)
    if dropout and key is not None:
        x = _drop(x, dropout, key)
    z_BTR = checkpoint_name(jnp.matmul(x, a_RI.T, precision=EXACT), NARROW)
    return jnp.matmul(z_BTR, b_OR.T, precision=EXACT)


def _gain(pair: Pair, weight_OI: Array) -> Array | int:
    """DoRA's (O,) float32: the trained norms over those of W + BA; 1 without DoRA.

    The latter are constants to gradients, as in section 4.3 of https://arxiv.org/abs/2402.09353.
    """
    if pair.magnitude_O is None:
        return 1
    sum_OI = weight_OI.astype(jnp.float32) + exact_product(pair.b_OR, pair.a_RI)
    norm_O = jnp.maximum(jnp.linalg.norm(sum_OI, axis=1), jnp.finfo(jnp.float32).tiny)
    norm_O = checkpoint_name(lax.stop_gradient(norm_O), NORM)
    return jnp.where(jnp.isnan(pair.magnitude_O), 1.0, pair.magnitude_O / norm_O)


def dense(weight: Array | Codes, inputs: int, dtype: Any) -> Array:
    """(..., O, I) of a weight, whichever way it is held; codes turn into `dtype`."""
    if isinstance(weight, Codes):
        return _dequantized(weight, inputs).astype(dtype)
    return plain(weight)


def plain(weight: Array) -> Array:
    """A weight that is held as the bits of bfloat16, or as it is."""
    return lax.bitcast_convert_type(weight, jnp.bfloat16) if weight.dtype == jnp.uint16 else weight


def exact_product(a: Array, b: Array) -> Array:
    """a @ b, summed and returned in float32."""
    return jnp.matmul(a, b, precision=EXACT, preferred_element_type=jnp.float32)


def _dequantized(codes: Codes, inputs: int) -> Array:
    """(..., O, I) in float32."""
    shape, groups = codes.packed_OP.shape[:-1], codes.scales_OG.shape[-1]
    values = _unpacked(codes.packed_OP, inputs).astype(jnp.float32)
    values = values.reshape(*shape, groups, inputs // groups)
    scales, biases = (a[..., None].astype(jnp.float32) for a in codes[1:])
    return (values * scales + biases).reshape(*shape, inputs)


def _unpacked(packed_OP: Array, inputs: int) -> Array:
    """Codes (..., O, I); those that cross the edge of a word take their high bits from the next."""
    bits = packed_OP.shape[-1] * 32 // inputs
    words, count = bits // math.gcd(bits, 32), 32 // math.gcd(bits, 32)
    runs = packed_OP.reshape(*packed_OP.shape[:-1], -1, words)

    def code(number: int) -> Array:
        place, shift = divmod(number * bits, 32)
        value = runs[..., place] >> shift
        if shift + bits > 32:
            value = value | (runs[..., place + 1] << (32 - shift))
        return value & (2**bits - 1)

    codes = jnp.stack([code(number) for number in range(count)], -1)
    return codes.reshape(*packed_OP.shape[:-1], inputs)


def _drop(x: Array, dropout: float, key: Array) -> Array:
    kept = jax.random.bernoulli(key, 1.0 - dropout, x.shape)
    return jnp.where(kept, x / (1.0 - dropout), 0).astype(x.dtype)
