"""Probes of arithmetic, of `.at[]` updates, of gathers and scatters, in every dtype."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pippin.check import Case
from pippin.check.families import FLOATS, Family
from pippin.engines.jax.probes.bench import DTYPES, Bench, exact, gap, unequal

ALL = (*FLOATS, "int32", "int8", "uint8")
UPDATES: dict[str, Any] = {
    "add": np.add,
    "multiply": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "divide": np.divide,
}


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
    yield "mask", unequal(a.at[x > 0].get(), x[x > 0])
    yield "chosen by mask", unequal(jnp.where(a > 0, a, 0), np.where(x > 0, x, 0))


def updated(bench: Bench, dtype: str) -> Iterator[Case]:
    """`.at[]` set, add, multiply, min, max and divide over a slice, a list and a mask."""
    a = bench.draw(dtype, 7, 9)
    x = exact(a)
    places: dict[str, Any] = {
        "slice": np.s_[1:6:2, 2:],
        "list": (np.array([6, 0, 3]), np.array([1, 1, 8])),
        "mask": x > 1,
    }
    for place, where in places.items():
        wanted = x.copy()
        wanted[where] = 4
        yield f"set by {place}", unequal(a.at[where].set(4), wanted)
        for name, update in _updates(dtype):
            wanted = x.copy()
            wanted[where] = update(wanted[where], 2)
            found = getattr(a.at[where], name)(2)
            yield f"{name} by {place}", unequal(found, wanted.astype(DTYPES[dtype]))


def repeated(bench: Bench, dtype: str) -> Iterator[Case]:
    """Repeated places: every addition counts, every factor, and the extremes of all."""
    a, rows = bench.put(np.full((5, 3), 8), dtype), np.array([4, 0, 4, 4, 0])
    values = np.array([3, 9, 7, 5, 2])[:, None] * np.ones(3)
    for name, update in _updates(dtype):
        operand = values if name in ("add", "min", "max") else np.full((5, 1), 2)
        wanted = np.full((5, 3), 8.0)
        update.at(wanted, rows, operand)
        yield name, unequal(getattr(a.at[rows], name)(bench.put(operand, dtype)), wanted)
    yield "set", unequal(a.at[rows].set(6), np.array([6, 8, 8, 8, 6])[:, None] * np.ones(3))
    yield "jitted", unequal(jax.jit(lambda a: a.at[rows].add(2))(a)[4], np.full(3, 14))


def _updates(dtype: str) -> Iterator[tuple[str, Any]]:
    """Whole numbers are not divided."""
    return ((n, update) for n, update in UPDATES.items() if n != "divide" or dtype in FLOATS)


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
