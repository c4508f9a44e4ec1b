"""Probes of products, sorting, softmax over a vocabulary, and random numbers."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pippin.check import Case
from pippin.check.families import Family
from pippin.engines.jax.device import pick_device
from pippin.engines.jax.probes.bench import Bench, exact, gap, unequal


def products(bench: Bench, dtype: str) -> Iterator[Case]:
    """dot_general: plain, batched, long inner sums, summed in float32 whatever goes in."""
    a, b = bench.draw(dtype, 33, 300), bench.draw(dtype, 65, 300, seed=1)
    wanted = exact(a) @ exact(b).T
    yield "a b^T", gap(jnp.matmul(a, b.T, precision=lax.Precision.HIGHEST), wanted)
    mixed = lax.dot_general(
        a,
        b,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    yield "float32 out", gap(mixed, wanted) + float(mixed.dtype != jnp.float32)
    sides = lax.dot_general(a, b.astype(jnp.float32), (((1,), (1,)), ((), ())), precision="highest")
    yield "sides of two dtypes", gap(sides, wanted)
    c, d = bench.draw(dtype, 4, 9, 16), bench.draw(dtype, 4, 16, 5, seed=1)
    yield "batched", gap(jnp.matmul(c, d, precision=lax.Precision.HIGHEST), exact(c) @ exact(d))
    long, wide = bench.draw(dtype, 2, 20000), bench.draw(dtype, 20000, 2, seed=1)
    found = jnp.matmul(long, wide, preferred_element_type=jnp.float32, precision="highest")
    yield "20000 inner", gap(found, exact(long) @ exact(wide))


def softmaxed(bench: Bench, dtype: str) -> Iterator[Case]:
    """Over the vocabulary, in float32, with large logits and masked ones."""
    logits = bench.draw(dtype, 8, bench.shapes.vocab) * 20
    x = exact(logits)
    x = x - x.max(1, keepdims=True)
    wanted = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    yield "softmax", gap(jax.nn.softmax(logits.astype(jnp.float32), 1), wanted)
    found = jax.nn.logsumexp(logits.astype(jnp.float32), 1)
    yield "logsumexp", gap(found, np.log(np.exp(x).sum(1)) + exact(logits).max(1))


def ordered(bench: Bench, dtype: str) -> Iterator[Case]:
    """sort, argsort and top_k; equal numbers keep their order."""
    a = bench.draw(dtype, 6, 501)
    x = exact(a)
    yield "sort", unequal(jnp.sort(a, 1), np.sort(x, 1))
    yield "argsort", unequal(jnp.argsort(a, 1, stable=True), np.argsort(x, 1, kind="stable"))
    values, places = lax.top_k(a, 20)
    order = np.argsort(-x, 1, kind="stable")[:, :20]
    yield "top_k", unequal(values, np.take_along_axis(x, order, 1))
    yield "places of top_k", unequal(places, order)
    yield "argmax", unequal(jnp.argmax(a, 1), x.argmax(1))
    yield "cumsum", gap(jnp.cumsum(a.astype(jnp.float32), 1), x.cumsum(1))


def drawn(bench: Bench, dtype: str) -> Iterator[Case]:
    """Threefry's numbers are the CPU's, bit for bit, and look like what they should be."""

    def draw(device: jax.Device) -> tuple[np.ndarray, np.ndarray]:
        with jax.default_device(device):
            key = jax.random.fold_in(jax.random.key(7), 3)
            uniform = jax.random.uniform(key, (20000,), dtype)
            return np.asarray(uniform), np.asarray(jax.random.bernoulli(key, 0.9, (20000,)))

    (uniform, kept), (wanted, wanted_kept) = draw(bench.device), draw(pick_device("cpu"))
    yield "uniform", unequal(uniform, wanted)
    yield "bernoulli", unequal(kept, wanted_kept)
    yield "share", max(0.0, abs(kept.mean() - 0.9) - 0.01)


FAMILIES = (
    Family(name="product.dot_general", measure=products),
    Family(name="softmax.vocabulary", measure=softmaxed, tolerance=2e-5),
    Family(name="order.sorted", measure=ordered, tolerance=2e-5),
    Family(name="random.threefry", measure=drawn, dtypes=("float32",), tolerance=0),
)
