"""Every probe of the MLX engine passes on this CPU, and fails where its fault is put in."""

import itertools
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest

from pippin.check import Shapes
from pippin.check.judge import judge
from pippin.engines.mlx import elementwise, probes
from pippin.engines.mlx.optimizer import Optimizer

pytestmark = pytest.mark.mlx

SHAPES = Shapes(tokens=300, length=40, vocab=1000, heads=4, kv_heads=2, head_dim=64)
attention, vjp, value_and_grad = mx.fast.scaled_dot_product_attention, mx.vjp, mx.value_and_grad
matmul, astype = mx.array.__matmul__, mx.array.astype


def leaking(query, key, value, *, scale, mask=None):
    """Causal attention that sees three tokens ahead."""
    if mask == "causal":
        length = query.shape[2]
        mask = mx.array(np.tril(np.ones((length, length), bool), 3))
    return attention(query, key, value, scale=scale, mask=mask)


def deaf(query, key, value, *, scale, mask=None):
    """A mask that is not applied."""
    return attention(query, key, value, scale=scale)


def astray(query, key, value, *, scale, mask=None):
    """The last key's value comes from behind the cache."""
    beyond = mx.full((*value.shape[:2], 1, value.shape[3]), 1e4, value.dtype)
    value = mx.concatenate([value[:, :, :-1], beyond], 2)
    return attention(query, key, value, scale=scale, mask=mask)


def times(own, factor=1.5):
    """A function whose result is too large."""
    return lambda *args, **kwargs: own(*args, **kwargs) * factor


def short(a, b):
    """Products forget what lies beyond inner index 32,000."""
    return matmul(a[..., :32000], b[..., :32000, :])


def wrong_gradients(function, inputs, upstream):
    """Gradients half as large again."""
    outs, grads = vjp(function, inputs, upstream)
    return outs, [g * 1.5 for g in grads]


def wrong_slopes(function):
    """The same of value_and_grad."""

    def call(*args):
        value, grad = value_and_grad(function)(*args)
        return value, grad * 1.5

    return call


def truncating(array, dtype):
    """Rounding toward zero."""
    kept = {mx.bfloat16: 0xFFFF0000, mx.float16: 0xFFFFE000}.get(dtype)
    if kept is None or array.dtype != mx.float32:
        return astype(array, dtype)
    return astype((array.view(mx.uint32) & kept).view(mx.float32), dtype)


class Lost(Optimizer):
    """An optimizer that leaves one parameter where it was."""

    def update(self, *args):
        name = next(iter(self.masters))
        before = self.masters[name]
        super().update(*args)
        self.masters = {**self.masters, name: before}


calls = itertools.count(1)
SDPA = "mlx.core.fast.scaled_dot_product_attention"
MATMUL = (mx.array, "__matmul__")
# Probe without its dtype -> where the fault is put, and the fault.
FAULTS = {
    "attention.causal": (SDPA, leaking),
    "attention.causality": (SDPA, leaking),
    "attention.masked": (SDPA, deaf),
    "attention.decode": (SDPA, astray),
    "attention.gradients": ("mlx.core.vjp", wrong_gradients),
    "product.plain": (MATMUL, times(matmul)),
    "product.long inner": (MATMUL, short),
    "product.vocabulary": (MATMUL, times(matmul)),
    "product.repeated": (MATMUL, lambda a, b: matmul(a, b) * (1 + 0.1 * next(calls))),
    "quantized.product": ("mlx.core.quantized_matmul", times(mx.quantized_matmul)),
    "quantized.unpacking": ("mlx.core.dequantize", times(mx.dequantize, 1.01)),
    "gradient.weight": ("mlx.core.vjp", wrong_gradients),
    "loss.cross-entropy": ("mlx.core.value_and_grad", wrong_slopes),
    "optimizer.update": ("pippin.engines.mlx.probes.training.Optimizer", Lost),
    "network.update": ("pippin.engines.mlx.gated.sigmoid", times(elementwise.sigmoid)),
    "compile.parity": ("mlx.core.compile", lambda function: times(function, 1.1)),
    "rounding.half precision": ((mx.array, "astype"), truncating),
    "function.norm": ("mlx.core.fast.layer_norm", times(mx.fast.layer_norm)),
    "function.rotation": ("mlx.core.fast.rope", times(mx.fast.rope)),
    "function.softmax": ("mlx.core.softmax", times(mx.softmax)),
    "index.gathers": (
        "mlx.core.take_along_axis",
        lambda a, ids, axis: mx.take(a, 0, 1, stream=mx.cpu)[:, None],
    ),
    "sum.many": ("mlx.core.cumsum", times(mx.cumsum, 1.01)),
    "random.numbers": (
        "mlx.core.random.normal",
        lambda shape, key: mx.random.uniform(shape=shape),
    ),
}


def family(name):
    """The probe's name without its dtype."""
    stem, _, last = name.rpartition(".")
    return stem if last in ("float32", "float16", "bfloat16") and "." in stem else name


PROBES = {probe.name: probe for probe in probes.probes("cpu", SHAPES)}


def test_there_are_enough():
    assert len(PROBES) >= 30
    assert {family(name) for name in PROBES} == set(FAULTS)


@pytest.mark.parametrize("name", PROBES)
def test_a_fault_is_found(name):
    where, fault = FAULTS[family(name)]
    patch = mock.patch(where, fault) if isinstance(where, str) else mock.patch.object(*where, fault)
    with patch:
        found = judge(PROBES[name])
    assert found.verdict in ("wrong", "inaccurate"), found
    assert judge(PROBES[name]).verdict == "pass"
