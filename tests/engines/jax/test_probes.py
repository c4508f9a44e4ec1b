"""The JAX probes pass on a CPU, and fail where a fault is put in."""

import jax.numpy as jnp
import pytest
from jax import lax

from pippin.check import Shapes
from pippin.check.judge import judge
from pippin.engines.jax import probes

pytestmark = pytest.mark.jax

SHAPES = Shapes(vocab=1000)
SLOW = ("work.train step.bfloat16",)  # the same code as its float32


def every():
    return [p for p in probes.probes("cpu", SHAPES) if p.name not in SLOW]


@pytest.mark.parametrize("probe", every(), ids=lambda probe: probe.name)
def test_every_probe_passes(probe):
    if probe.name.startswith("work.MJX"):
        pytest.importorskip("mujoco")
    found = judge(probe)
    assert found.verdict == "pass", found


PAD, TOP_K, SCAN = lax.pad, lax.top_k, lax.scan
FAULTS = {
    "pad.edges.bfloat16": (
        lax,
        "pad",
        lambda a, v, config: PAD(a, v, [(abs(low), high, i) for low, high, i in config]),
    ),
    "pad.value.int32": (lax, "pad", lambda a, v, config: PAD(a, v.astype(a.dtype), config)),
    "order.sorted.float32": (lax, "top_k", lambda a, k: TOP_K(-a, k)),
    "array.arithmetic.bfloat16": (jnp, "tanh", lambda a: a),
    "array.read.float32": (jnp, "where", lambda mask, a, b: a),
    "softmax.vocabulary.bfloat16": (jnp, "float32", jnp.bfloat16),
    "control.loops.float32": (lax, "scan", lambda f, c, xs: SCAN(f, c, xs[:-1])),
    "product.dot_general.bfloat16": (
        jnp,
        "matmul",
        lambda a, b, **_: jnp.einsum("...ij,...jk->...ik", a[..., :-3], b[..., :-3, :]),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught(name, monkeypatch):
    module, attribute, broken = FAULTS[name]
    probe = next(p for p in probes.probes("cpu", SHAPES) if p.name == name)
    monkeypatch.setattr(module, attribute, broken)
    assert judge(probe).verdict in ("wrong", "inaccurate")


def test_an_operator_that_jax_mps_lacks_is_named(monkeypatch):
    from pippin.engines.jax.probes import work

    monkeypatch.setattr(work, "OPERATORS", work.OPERATORS - {"dot_general"})
    found = judge(next(p for p in probes.probes("cpu", SHAPES) if "jax-mps" in p.name))
    assert found.verdict == "wrong"
    assert "dot_general" in found.detail
