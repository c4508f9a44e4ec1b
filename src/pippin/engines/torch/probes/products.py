"""Probes of matrix products: inner lengths around 32767, vocabularies, many rows, odd layouts.

Shape letters: M rows, N columns, K the inner length, V vocabulary, D hidden.
"""

from collections.abc import Iterator

import torch
from torch.nn.functional import linear

from pippin.check import Case
from pippin.check.families import FLOAT32, Family
from pippin.engines.torch.probes.bench import Bench, exact, gap

EDGES = (32766, 32767, 32768, 32769, 65537)
VOCABS = (32000, 128257, 151936)
UPDATE = "update PyTorch (2.14 on an M1 or M2), or keep batch x tokens below 32768"


def plain(bench: Bench, dtype: torch.dtype) -> Iterator[Case]:
    """Ordinary and odd sizes."""
    for m, k, n in ((1, 64, 64), (7, 100, 33), (128, 576, 1536), (257, 3200, 100)):
        a, b = bench.draw(m, k, dtype=dtype), bench.draw(k, n, dtype=dtype, seed=1)
        yield f"{m} x {k} x {n}", gap(a @ b, exact(a) @ exact(b))


def long_inner(bench: Bench, dtype: torch.dtype) -> Iterator[Case]:
    """Inner lengths at which index types overflow, with enough rows for the tiled kernel."""
    for k in sorted({*EDGES, bench.shapes.tokens}):
        a, b = bench.draw(17, k, dtype=dtype), bench.draw(k, 18, dtype=dtype, seed=1)
        yield f"K {k}", gap(a @ b, exact(a) @ exact(b))


def batched_inner(bench: Bench, dtype: torch.dtype) -> Iterator[Case]:
    """The same in batches."""
    for k in EDGES:
        a, b = bench.draw(3, 16, k, dtype=dtype), bench.draw(3, k, 16, dtype=dtype, seed=1)
        yield f"K {k}", gap(torch.bmm(a, b), exact(a) @ exact(b))


def vocabulary(bench: Bench, dtype: torch.dtype) -> Iterator[Case]:
    """Hidden states times a head of many words."""
    for vocab in sorted({*VOCABS, bench.shapes.vocab}):
        hidden_MD = bench.draw(19, 64, dtype=dtype)
        head_VD = bench.draw(vocab, 64, dtype=dtype, seed=1)
        yield (
            f"vocabulary {vocab}",
            gap(linear(hidden_MD, head_VD), exact(hidden_MD) @ exact(head_VD).T),
        )


def repeated_linear(bench: Bench, dtype: torch.dtype) -> Iterator[Case]:
    """A linear without bias over three dimensions gives the same every time it is called."""
    x, weight = bench.draw(2, 65, 256, dtype=dtype), bench.draw(384, 256, dtype=dtype, seed=1)
    wanted = exact(x) @ exact(weight).T
    outs = [linear(x, weight) for _ in range(8)]
    yield "against float64", gap(outs[0], wanted)
    for number, out in enumerate(outs[1:], 2):
        same = bool((out == outs[0]).all())
        yield f"call {number} against the first", 0.0 if same else float("inf")


def many_rows(bench: Bench, dtype: torch.dtype) -> Iterator[Case]:
    """A linear with bias over more than 65,536 rows."""
    for rows in (65535, 65537, 70001):
        x, weight = bench.draw(rows, 1, 8, dtype=dtype), bench.draw(16, 8, dtype=dtype, seed=1)
        bias = bench.draw(16, dtype=dtype, seed=2)
        wanted = exact(x) @ exact(weight).T + exact(bias)
        yield f"{rows} rows", gap(linear(x, weight, bias), wanted)


def layouts(bench: Bench, dtype: torch.dtype) -> Iterator[Case]:
    """Transposed, sliced and expanded operands."""
    a, b = bench.draw(48, 80, dtype=dtype), bench.draw(48, 40, dtype=dtype, seed=1)
    yield "transposed", gap(a.T @ b, exact(a).T @ exact(b))
    yield "sliced", gap(a[3:40:2, 1:41] @ b[:40], exact(a)[3:40:2, 1:41] @ exact(b)[:40])
    row = bench.draw(1, 1, 80, dtype=dtype, seed=2).expand(5, 48, 80)
    yield "expanded", gap(row @ a.T, exact(row) @ exact(a).T)
    column = bench.draw(80, 1, dtype=dtype, seed=3).expand(80, 24)
    yield "expanded column", gap(a @ column, exact(a) @ exact(column))


FAMILIES = (
    Family(name="product.plain", measure=plain, remedy=FLOAT32, avoid="dtype"),
    Family(name="product.long inner", measure=long_inner, remedy=UPDATE),
    Family(name="product.batched inner", measure=batched_inner, remedy=UPDATE),
    Family(name="product.vocabulary", measure=vocabulary, remedy=FLOAT32, avoid="dtype"),
    Family(name="product.repeated", measure=repeated_linear, remedy=FLOAT32, avoid="dtype"),
    Family(name="product.many rows", measure=many_rows, remedy=UPDATE),
    Family(name="product.layouts", measure=layouts, remedy=UPDATE),
)
