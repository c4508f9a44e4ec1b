"""Probes of control flow: scan, while, cond, and their gradients, with and without remat."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pippin.check import Case
from pippin.check.families import Family
from pippin.engines.jax.probes.bench import Bench, exact, gap, unequal


def loops(bench: Bench, dtype: str) -> Iterator[Case]:
    """scan with outputs, a while loop of unknown length, cond of both outcomes."""
    a = bench.draw(dtype, 12, 5)
    x = exact(a)
    last, outs = lax.scan(lambda c, r: (0.5 * c + r, c), jnp.zeros(5, a.dtype), a)
    carry, wanted = np.zeros(5), []
    for row in x:
        wanted.append(carry)
        carry = 0.5 * carry + row
    yield "scan", gap(last, carry)
    yield "outputs of scan", gap(outs, np.array(wanted))
    start = bench.put(np.array(1.0), dtype)
    yield "while", unequal(lax.while_loop(lambda v: v < 100, lambda v: v * 2, start), np.array(128))
    choose = jax.jit(lambda flag, v: lax.cond(flag, lambda v: v + 1, lambda v: v - 1, v))
    yield "cond", unequal(jnp.stack([choose(True, start), choose(False, start)]), np.array([2, 0]))
    turned = jnp.stack([lax.switch(i, [jnp.negative, jnp.abs], -start) for i in (0, 1)])
    yield "switch", unequal(turned, np.array([1, 1]))


def gradients(bench: Bench, dtype: str) -> Iterator[Case]:
    """Through a scan of products, plain and recomputed; in closed form sum_i prod_j w_j / w_i."""
    weights = bench.put(1 + np.arange(1, 9) / 32, dtype)
    start = bench.put(np.ones(1), dtype)

    def chain(weights: Array, remat: bool) -> Array:
        def step(c: Array, w: Array) -> tuple[Array, None]:
            return c * w, None

        last, _ = lax.scan(jax.checkpoint(step) if remat else step, start, weights)
        return last.sum()

    x = exact(weights)
    for remat in (False, True):
        found = jax.jit(jax.grad(chain), static_argnums=1)(weights, remat)
        yield "remat" if remat else "plain", gap(found, x.prod() / x)


FAMILIES = (
    Family(name="control.loops", measure=loops),
    Family(name="control.gradients", measure=gradients),
)
