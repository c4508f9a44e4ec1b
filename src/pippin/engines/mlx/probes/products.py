"""Probes of MLX's matrix products: long inner lengths, vocabularies, layouts, quantized weights.

Shape letters: M rows, N columns, K the inner length, V vocabulary.
"""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from pippin.check import Case, Shapes
from pippin.check.families import FLOAT32, Family, Single
from pippin.engines.mlx.probes.bench import draw, exact, gap, unequal

EDGES = (32766, 32767, 32768, 32769, 65537)
VOCABS = (32000, 128257)
DENSE = "merge and evaluate dense weights: quantize for another engine's deployment"


def plain(shapes: Shapes, dtype: mx.Dtype) -> Iterator[Case]:
    """Ordinary and odd sizes, transposed and sliced operands."""
    for m, k, n in ((1, 64, 64), (7, 100, 33), (128, 576, 300), (57, 3200, 100)):
        a, b = draw(m, k, dtype=dtype), draw(k, n, dtype=dtype, seed=1)
        yield f"{m} x {k} x {n}", gap(a @ b, exact(a) @ exact(b))
    a, b = draw(48, 80, dtype=dtype), draw(48, 40, dtype=dtype, seed=1)
    yield "transposed", gap(a.T @ b, exact(a).T @ exact(b))
    yield "sliced", gap(a[3:40:2, 1:41] @ b[:40], exact(a)[3:40:2, 1:41] @ exact(b)[:40])


def long_inner(shapes: Shapes, dtype: mx.Dtype) -> Iterator[Case]:
    """Inner lengths at which index types overflow, alone and in batches."""
    for k in sorted({*EDGES, shapes.tokens}):
        a, b = draw(2, 17, k, dtype=dtype), draw(2, k, 18, dtype=dtype, seed=1)
        yield f"K {k}", gap(a[0] @ b[0], exact(a)[0] @ exact(b)[0])
        yield f"K {k}, batched", gap(a @ b, exact(a) @ exact(b))


def vocabulary(shapes: Shapes, dtype: mx.Dtype) -> Iterator[Case]:
    """Hidden states times a head of many words."""
    for vocab in sorted({*VOCABS, shapes.vocab}):
        hidden, head = draw(9, 64, dtype=dtype), draw(vocab, 64, dtype=dtype, seed=1)
        yield f"vocabulary {vocab}", gap(hidden @ head.T, exact(hidden) @ exact(head).T)


def quantized(shapes: Shapes, dtype: mx.Dtype) -> Iterator[Case]:
    """Products with packed weights: the dequantized ones, exactly computed."""
    weight = draw(96, 256, dtype=dtype, seed=1)
    for bits in (2, 3, 4, 5, 6, 8):
        for group in (32, 64, 128):
            packed = mx.quantize(weight, group_size=group, bits=bits)
            x = draw(5, 256, dtype=dtype)
            out = mx.quantized_matmul(x, *packed, group_size=group, bits=bits)
            wanted = exact(x) @ _dequantized(packed, bits).T
            yield f"{bits} bits in groups of {group}", gap(out, wanted)


def unpacking(shapes: Shapes) -> Iterator[Case]:
    """Dequantized weights are scale x code + bias, with the codes that lie in the words."""
    weight = draw(32, 256)
    for bits in (2, 3, 4, 5, 6, 8):
        packed = mx.quantize(weight, group_size=64, bits=bits)
        out = mx.dequantize(*packed, group_size=64, bits=bits)
        yield f"{bits} bits", gap(out, _dequantized(packed, bits))


def _dequantized(packed: tuple[mx.array, ...], bits: int) -> np.ndarray:
    """scale x code + bias in float64, the codes read bit by bit from the words."""
    words, scales, biases = packed
    stream = np.unpackbits(np.array(words).view(np.uint8), axis=1, bitorder="little")
    codes = (stream.reshape(len(stream), -1, bits) * (1 << np.arange(bits))).sum(-1)
    grouped = codes.reshape(len(codes), scales.shape[1], -1)
    dense = grouped * exact(scales)[..., None] + exact(biases)[..., None]
    return dense.reshape(len(codes), -1)


def repeated(shapes: Shapes, dtype: mx.Dtype) -> Iterator[Case]:
    """The same product gives the same every time."""
    x, weight = draw(2, 65, 256, dtype=dtype), draw(256, 384, dtype=dtype, seed=1)
    first = exact(x @ weight)
    for number in range(2, 9):
        yield f"call {number} against the first", unequal(x @ weight, first)


FAMILIES = (
    Family(name="product.plain", measure=plain, remedy=FLOAT32, avoid="dtype"),
    Family(name="product.long inner", measure=long_inner),
    Family(name="product.vocabulary", measure=vocabulary, remedy=FLOAT32, avoid="dtype"),
    Family(name="product.repeated", measure=repeated, tolerance=0.0),
    Family(name="quantized.product", measure=quantized, factor=3.0, remedy=DENSE, avoid=""),
    Single(name="quantized.unpacking", measure=unpacking, tolerance=1e-6, remedy=DENSE, avoid=""),
)
