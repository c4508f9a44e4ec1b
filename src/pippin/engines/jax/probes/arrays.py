"""Probes of arithmetic, of `.at[]` updates, of gathers and scatters, in every dtype."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pippin.check import Case
from pippin.check.families import FLOATS, Family
from pippin.engines.jax.probes.bench import DTYPES, Bench, exact, gap, unequal

ALL = tuple(DTYPES)


def arithmetic(bench: Bench, dtype: str) -> Iterator[Case]:
    """The four operations and the functions a decoder uses."""
    a, b = bench.draw(dtype, 33, 65), bench.draw(dtype, 33, 65, seed=1)
    x, y = exact(a), exact(b)
    yield "sum", gap(a + b, x + y)
    yield "difference", gap(a - b, x - y)
    yield "product", gap(a * b, x * y)
    yield "quotient", gap(a / (jnp.abs(b) + 1), x / (np.abs(y) + 1))
    yield "extremes", unequal(jnp.maximum(a, 0) + jnp.minimum(b, 0), _added(dtype, x, y))
    yield "exp", gap(jnp.exp(a), np.exp(x))
    yield "tanh", gap(jnp.tanh(a), np.tanh(x))
    yield "rsqrt", gap(jax.lax.rsqrt(jnp.abs(a) + 1), (np.abs(x) + 1) ** -0.5)
    yield "sum of a row", gap(jnp.sum(a, 1), x.sum(1))


def _added(dtype: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return (np.maximum(x, 0) + np.minimum(y, 0)).astype(DTYPES[dtype])


def narrowing(bench: Bench, dtype: str) -> Iterator[Case]:
    """float32 to this dtype and back rounds to the nearest, infinities and subnormals included."""
    values = np.concatenate([np.random.default_rng(0).normal(size=999) * 1e3, [0.0, -0.0, np.inf]])
    wide = bench.put(values, "float32")
    wanted = values.astype(np.float32).astype(DTYPES[dtype])
    yield "nearest", unequal(wide.astype(DTYPES[dtype]), wanted)


def read(bench: Bench, dtype: str) -> Iterator[Case]:
    """`.at[].get` and indexing: slices, lists, masks, places outside."""
    a = bench.draw(dtype, 7, 9)
    x, rows = exact(a), np.array([6, 0, 0, 3])
    yield "slice", unequal(a[1:6:2, ::-1], x[1:6:2, ::-1])
    yield "rows", unequal(a.at[rows].get(), x[rows])
    yield (
        "filled",
        unequal(a.at[jnp.array([2, 99])].get(mode="fill", fill_value=7)[1], np.full(9, 7)),
    )
    yield "clipped", unequal(a.at[jnp.array([2, 99])].get(mode="clip"), x[[2, 6]])
    yield "mask", unequal(jnp.where(a > 0, a, 0), np.where(x > 0, x, 0))


def updated(bench: Bench, dtype: str) -> Iterator[Case]:
    """`.at[]` set, multiply, divide, min and max over slices, lists and masks."""
    a = bench.draw(dtype, 7, 9)
    x, rows, columns = exact(a), np.array([6, 0, 3]), np.array([1, 1, 8])
    wanted = x.copy()
    wanted[1:6:2, 2:] = 4
    yield "set of a slice", unequal(a.at[1:6:2, 2:].set(4), wanted)
    wanted = x.copy()
    wanted[rows, columns] = 5
    yield "set of places", unequal(a.at[rows, columns].set(5), wanted)
    yield "set by mask", unequal(jnp.where(a > 1, 3, a), np.where(x > 1, 3, x))
    wanted = x.copy()
    wanted[0] *= 2
    yield "multiply", unequal(a.at[0].multiply(2), wanted.astype(DTYPES[dtype]))
    for name in ("min", "max"):
        wanted = x.copy()
        function = {"min": np.minimum, "max": np.maximum}[name]
        wanted[:, 1] = function(wanted[:, 1], 1)
        yield name, unequal(getattr(a.at[:, 1], name)(1), wanted)
    if dtype in FLOATS:
        wanted = x.copy()
        wanted[2] /= 2
        yield "divide", unequal(a.at[2].divide(2), wanted.astype(DTYPES[dtype]))


def repeated(bench: Bench, dtype: str) -> Iterator[Case]:
    """Repeated places: every addition counts, every factor, and the extremes of all."""
    a = bench.put(np.ones((5, 3)), dtype)
    rows = np.array([4, 0, 4, 4, 0])
    wanted = np.ones((5, 3))
    np.add.at(wanted, rows, 1)
    yield "add", unequal(a.at[rows].add(1), wanted)
    wanted = np.ones((5, 3))
    np.multiply.at(wanted, rows, 2)
    yield "multiply", unequal(a.at[rows].multiply(2), wanted)
    values = bench.put(np.array([3, 9, 7, 5, 2])[:, None] * np.ones(3), dtype)
    yield "max", unequal(a.at[rows].max(values)[jnp.array([0, 4])], np.array([[9] * 3, [7] * 3]))
    yield "jitted", unequal(jax.jit(lambda a: a.at[rows].add(2))(a)[4], np.full(3, 7))


def scattered(bench: Bench, dtype: str) -> Iterator[Case]:
    """Embedding rows of a whole vocabulary, their gradient, and a target's logit of every row."""
    vocab = bench.shapes.vocab
    table = bench.draw(dtype, vocab, 16)
    ids = np.random.default_rng(2).integers(0, vocab, 300)
    ids[:2] = 0, vocab - 1
    yield "lookup", unequal(table[ids], exact(table)[ids])
    places = np.random.default_rng(3).integers(0, 20, 300)
    upstream = bench.draw(dtype, 300, 16, seed=1)
    found = jax.ops.segment_sum(upstream.astype(jnp.float32), places, 20)
    wanted = np.zeros((20, 16))
    np.add.at(wanted, places, exact(upstream))
    yield "sums by segment", gap(found, wanted)
    logits = bench.draw(dtype, 20, vocab)
    picked = jnp.take_along_axis(logits, ids[:20, None], 1)
    yield "targets", unequal(picked, np.take_along_axis(exact(logits), ids[:20, None], 1))


FAMILIES = (
    Family(name="array.arithmetic", measure=arithmetic),
    Family(name="array.narrowing", measure=narrowing, dtypes=("float16", "bfloat16"), tolerance=0),
    Family(name="array.read", measure=read, dtypes=ALL, tolerance=0),
    Family(name="array.updated", measure=updated, dtypes=ALL, tolerance=0),
    Family(name="array.repeated", measure=repeated, dtypes=ALL, tolerance=0),
    Family(name="array.scattered", measure=scattered),
)
