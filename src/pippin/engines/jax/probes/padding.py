"""Probes of `lax.pad`: edges added or cut, holes between, in every dtype; and of dilation."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from pippin.check import Case
from pippin.check.families import FLOATS, Family
from pippin.engines.jax.probes.arrays import ALL
from pippin.engines.jax.probes.bench import DTYPES, Bench, exact, gap, unequal

# (low, high, interior) by axis.
CONFIGS = (
    ((1, 1, 0), (0, 2, 0)),
    ((-1, 0, 0), (0, -1, 0)),
    ((0, 0, 1), (0, 0, 2)),
    ((-1, 2, 1), (1, -2, 2)),
    ((-2, -1, 3), (-1, -1, 1)),
)


def padded(bench: Bench, dtype: str) -> Iterator[Case]:
    """Every sign of every edge, eagerly and compiled."""
    a, value = bench.draw(dtype, 3, 4), np.asarray(7).astype(DTYPES[dtype])
    for config in CONFIGS:
        wanted = _pad(exact(a), config, float(value))
        yield f"{config}", unequal(lax.pad(a, value, config), wanted)
        compiled = jax.jit(lambda a, config=config: lax.pad(a, value, config))
        yield f"{config} compiled", unequal(compiled(a), wanted)


def value_dtype(bench: Bench, dtype: str) -> Iterator[Case]:
    """A padding value of another dtype is refused; `jnp.pad` converts it instead."""
    a = bench.draw(dtype, 3, 4)
    other = jnp.zeros((), jnp.float32 if dtype != "float32" else jnp.bfloat16)
    try:
        lax.pad(a, other, CONFIGS[0])
        refused = False
    except TypeError:
        refused = True
    yield "lax.pad refuses", 0.0 if refused else 1.0
    kept = jnp.pad(a, ((1, 1), (0, 2)), constant_values=3)
    yield "jnp.pad keeps the dtype", 0.0 if kept.dtype == a.dtype else 1.0
    yield "jnp.pad converts", unequal(kept, _pad(exact(a), CONFIGS[0], 3))


def gradient(bench: Bench, dtype: str) -> Iterator[Case]:
    """Back through a pad with cut edges and holes: what was cut gets nothing."""
    a = bench.draw(dtype, 3, 4)
    zero = jnp.zeros((), a.dtype)
    for config in CONFIGS:
        found = jax.grad(lambda a, c=config: (lax.pad(a, zero, c) * 2).sum())(a)
        marks = _pad(np.arange(1.0, 13).reshape(3, 4), config, 0)
        kept = np.isin(np.arange(1, 13), marks).reshape(3, 4)
        yield f"{config}", unequal(found, 2.0 * kept)


def dilated(bench: Bench, dtype: str) -> Iterator[Case]:
    """A convolution with holes in input and kernel."""
    x, k = bench.draw(dtype, 1, 1, 5, 6), bench.draw(dtype, 1, 1, 2, 3, seed=1)
    found = lax.conv_general_dilated(x, k, (1, 1), [(1, 2), (0, 1)], (2, 1), (1, 2))
    spread = _pad(exact(x)[0, 0], ((1, 2, 1), (0, 1, 0)), 0)
    kernel = _pad(exact(k)[0, 0], ((0, 0, 0), (0, 0, 1)), 0)
    yield "both dilations", gap(found[0, 0], _correlate(spread, kernel))


def _pad(x: NDArray[Any], config: Any, value: float) -> NDArray[Any]:
    """What lax.pad means: holes first, then edges added, then edges cut."""
    for axis, (low, high, interior) in enumerate(config):
        x = np.moveaxis(x, axis, 0)
        grown = np.full(((len(x) - 1) * (interior + 1) + 1, *x.shape[1:]), value, x.dtype)
        grown[:: interior + 1] = x
        edges = ((max(low, 0), max(high, 0)), *[(0, 0)] * (x.ndim - 1))
        grown = np.pad(grown, edges, constant_values=value)
        x = np.moveaxis(grown[max(-low, 0) : len(grown) - max(-high, 0)], 0, axis)
    return x


def _correlate(x: NDArray[Any], kernel: NDArray[Any]) -> NDArray[Any]:
    windows = np.lib.stride_tricks.sliding_window_view(x, kernel.shape)
    return np.einsum("ijkl,kl->ij", windows, kernel)


FAMILIES = (
    Family(name="pad.edges", measure=padded, dtypes=tuple(DTYPES), tolerance=0),
    Family(name="pad.value", measure=value_dtype, dtypes=ALL, tolerance=0),
    Family(name="pad.gradient", measure=gradient, dtypes=FLOATS, tolerance=0),
    Family(name="pad.dilated", measure=dilated),
)
