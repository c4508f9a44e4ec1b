"""Probes of single operations on MLX: rounding, norms, rotations, gathers, sums, random numbers."""

from collections.abc import Iterator

import ml_dtypes
import mlx.core as mx
import numpy as np

from pippin.check import Case, Shapes
from pippin.check.families import FLOAT32, Family, Single
from pippin.engines.mlx.probes.bench import draw, exact, gap, unequal

COUNT = 100_003
SIGMAS = 5.0


def rounding(shapes: Shapes) -> Iterator[Case]:
    """float32 to bfloat16 and float16: to nearest, ties to even, infinities and NaN kept."""
    rng = np.random.default_rng(0)
    for name, dtype, kind, dropped in (
        ("bfloat16", mx.bfloat16, ml_dtypes.bfloat16, 16),
        ("float16", mx.float16, np.float16, 13),
    ):
        half = np.uint32(1 << (dropped - 1))
        kept = rng.standard_normal(1000).astype(np.float32).view(np.uint32) >> dropped << dropped
        ties = np.concatenate([kept + half, kept + half - 1, kept + half + 1]).view(np.float32)
        values = np.append(ties, [0.0, 65519.0, np.inf, -np.inf, np.nan]).astype(np.float32)
        wanted = values.astype(kind).astype(np.float32)
        yield name, unequal(mx.array(values).astype(dtype).astype(mx.float32), wanted)


def norms(shapes: Shapes, dtype: mx.Dtype) -> Iterator[Case]:
    """MLX's fused RMS and layer norms, rows of large and of tiny values among them."""
    for width in (64, 576, 3200):
        x = draw(6, width, dtype=dtype) * mx.array([[1.0], [200], [0.01], [1], [1], [1]], dtype)
        weight, values = draw(width, dtype=dtype, seed=1), exact(x)
        size = np.sqrt((values**2).mean(-1, keepdims=True) + 1e-6)
        wanted = values / size * exact(weight)
        yield f"RMS of {width}", gap(mx.fast.rms_norm(x, weight, 1e-6), wanted)
        centred = values - values.mean(-1, keepdims=True)
        wanted = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * exact(weight)
        yield f"layer norm of {width}", gap(mx.fast.layer_norm(x, weight, None, 1e-5), wanted)


def rotations(shapes: Shapes) -> Iterator[Case]:
    """MLX's fused rotary embedding up to position 131,000; a float32 angle is off by 8e-3 there."""
    x = draw(1, 2, 5, 64)
    for offset in (0, 511, 32767, 131000):
        out = mx.fast.rope(x, 64, traditional=False, base=1e4, scale=1.0, offset=offset)
        angles = np.outer(offset + np.arange(5), 1e4 ** -(np.arange(32) / 32))
        first, second = exact(x)[..., :32], exact(x)[..., 32:]
        turned = (
            first * np.cos(angles) - second * np.sin(angles),
            first * np.sin(angles) + second * np.cos(angles),
        )
        yield f"from position {offset}", gap(out, np.concatenate(turned, -1))


def softmax(shapes: Shapes, dtype: mx.Dtype) -> Iterator[Case]:
    """Large values, wide rows, masked ones."""
    for width in (7, 1025, shapes.vocab):
        x = 30 * draw(5, width, dtype=dtype)
        x = mx.where(mx.arange(width) % 3 == 0, mx.array(-1e4, dtype), x)
        powers = np.exp(exact(x) - exact(x).max(-1, keepdims=True))
        yield f"row of {width}", gap(mx.softmax(x, -1), powers / powers.sum(-1, keepdims=True))


def gathers(shapes: Shapes) -> Iterator[Case]:
    """Rows of a table, values added at repeated places, the target of every row."""
    rng, vocab = np.random.default_rng(0), shapes.vocab
    table, ids = draw(vocab, 8), rng.integers(0, vocab, 500)
    yield "lookup", unequal(table[mx.array(ids)], exact(table)[ids])
    few, values = rng.integers(0, 20, 700), draw(700, 8, seed=1)
    wanted = np.zeros((20, 8))
    np.add.at(wanted, few, exact(values))
    yield "added", gap(mx.zeros((20, 8)).at[mx.array(few)].add(values), wanted)
    logits, targets = draw(40, vocab, seed=2), ids[:40, None]
    picked = mx.take_along_axis(logits, mx.array(targets), 1)
    yield "picked", unequal(picked, np.take_along_axis(exact(logits), targets, 1))


def sums(shapes: Shapes) -> Iterator[Case]:
    """Sums over many numbers, running sums, the largest."""
    x = mx.abs(draw(1024, 1024))
    yield "1,048,576 numbers", gap(x.sum(), exact(x).sum())
    yield "of columns", gap(x.sum(0), exact(x).sum(0))
    yield "running", gap(mx.cumsum(x, 1), exact(x).cumsum(1))
    wide = draw(7, shapes.vocab)
    yield "the largest", unequal(mx.argmax(wide, -1), exact(wide).argmax(-1))


def random(shapes: Shapes) -> Iterator[Case]:
    """A key gives the same numbers again, another gives others, spread as asked."""
    first, again, other = (mx.random.normal((COUNT,), key=mx.random.key(s)) for s in (7, 7, 8))
    yield "the same key", unequal(again, exact(first))
    yield "another key", float(unequal(other, exact(first)) < 0.999)
    values = exact(first)
    yield "mean", float(abs(values.mean()) > SIGMAS / COUNT**0.5)
    yield "spread", float(abs(values.std() - 1) > 0.02)


FAMILIES = (
    Single(name="rounding.half precision", measure=rounding, remedy=FLOAT32, avoid="dtype"),
    Family(name="function.norm", measure=norms, remedy=FLOAT32, avoid="dtype"),
    Single(name="function.rotation", measure=rotations, tolerance=1e-2),
    Family(name="function.softmax", measure=softmax, remedy=FLOAT32, avoid="dtype"),
    Single(name="index.gathers", measure=gathers, tolerance=1e-5),
    Single(name="sum.many", measure=sums, tolerance=2e-4),
    Single(
        name="random.numbers",
        measure=random,
        remedy="draw on the CPU; adapters are, and sampling inverts numpy's draws",
        avoid="",
    ),
)
