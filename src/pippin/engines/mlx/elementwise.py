"""Exponentials. On a CPU MLX computes them one number at a time; here float32 is several at once.

Shape letters: B rows, L tokens of one, H heads, K kv heads, J heads a kv head, C channels.
"""

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.polynomial import Chebyshev, Polynomial

LOG2_E = 1.4426950408889634
# 2^f for f in [-1/2, 1/2], lowest power first: interpolated at Chebyshev's points, off by 1e-7.
TERMS = Chebyshev.interpolate(np.exp2, 5, domain=[-0.5, 0.5]).convert(kind=Polynomial).coef.tolist()
EXPONENT, BIAS = float(1 << 23), float(127 << 23)  # of float32's bits


def exp(x: mx.array) -> mx.array:
    """e^x, not to be differentiated; on a CPU float32 ends at 2^-100 and 2^127.

    Less than that, divided by a sum, would be no normal number: products are slow with such.
    """
    if not on_cpu(x):
        return mx.exp(x)
    power = mx.clip(x * LOG2_E, -100.0, 127.0)
    whole = mx.round(power)
    part = power - whole
    value = part * TERMS[-1] + TERMS[-2]
    for term in TERMS[-3::-1]:
        value = value * part + term
    return value * (whole * EXPONENT + BIAS).astype(mx.int32).view(mx.float32)


def sigmoid(x: mx.array) -> mx.array:
    """1 / (1 + e^-x), not to be differentiated."""
    return 1.0 / (1.0 + exp(-x)) if on_cpu(x) else mx.sigmoid(x)


def logsumexp(x: mx.array) -> mx.array:
    """Over the last axis, which is kept; not to be differentiated."""
    if not on_cpu(x):
        return mx.logsumexp(x, axis=-1, keepdims=True)
    top = x.max(-1, keepdims=True)
    return mx.log(exp(x - top).sum(-1, keepdims=True)) + top


def attend(
    query: mx.array, key: mx.array, value: mx.array, mask_LL: mx.array, scale: float
) -> mx.array:
    """Attention with a mask that is added: (B, H, L, C), (B, K, L, C) -> (B, H, L, C)."""
    rows, _, length, channels = query.shape
    query_BKJLC = query.reshape(rows, key.shape[1], -1, length, channels) * scale
    scores_BKJLL = query_BKJLC @ key[:, :, None].swapaxes(-1, -2) + mask_LL
    chances_BKJLL: Any = _softmax(scores_BKJLL)
    return (chances_BKJLL @ value[:, :, None]).reshape(query.shape)


def on_cpu(x: mx.array) -> bool:
    """Whether the functions here are faster than MLX's."""
    return x.dtype == mx.float32 and mx.default_device() == mx.cpu


@mx.custom_function
def _softmax(x: mx.array) -> mx.array:
    powers = exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


@_softmax.vjp
def _backward(primals: Any, cotangent: mx.array, chances: mx.array) -> mx.array:
    del primals
    return chances * (cotangent - (chances * cotangent).sum(-1, keepdims=True))
