"""Products with a layer's linears: weights dense, as the bits of bfloat16, or as codes.

Shape letters: L layers, O outputs, I inputs, P packed words, G groups, R rank.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

EXACT = lax.Precision.HIGHEST  # float32 products stay float32 on hardware that would round them
# XLA may leave out roundings to bfloat16 between operators; PyTorch rounds after each of them.
ROUNDS = {"xla_allow_excess_precision": False}

# By linear within a layer: A (L, R, I) and B (L, O, R), B already scaled.
Lora: TypeAlias = dict[str, tuple[Array, Array]]
Project: TypeAlias = Callable[[str, Array], Array]


class Codes(NamedTuple):
    """Quantized weights (..., O, I) in the layout of `model/quantized.py`: code * scale + bias."""

    packed_OP: Array
    scales_OG: Array
    biases_OG: Array


def linears(
    weights: dict[str, Any], lora: Lora, dropout: float = 0.0, key: Array | None = None
) -> Project:
    """x W^T + bias + dropout(x) A^T B^T of one layer's linears, by name."""

    def project(name: str, x: Array) -> Array:
        weight_OI = dense(weights[f"{name}.weight"], x.shape[-1], x.dtype)
        y = jnp.matmul(x, weight_OI.T, precision=EXACT)
        if f"{name}.bias" in weights:
            y = y + weights[f"{name}.bias"]
        if name not in lora:
            return y
        a_RI, b_OR = (side.astype(x.dtype) for side in lora[name])
        if dropout and key is not None:
            x = _drop(x, dropout, jax.random.fold_in(key, sorted(lora).index(name)))
        z_BTR = jnp.matmul(x, a_RI.T, precision=EXACT)
        return y + jnp.matmul(z_BTR, b_OR.T, precision=EXACT)

    return project


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
