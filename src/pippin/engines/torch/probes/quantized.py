"""Probes of products with integer weights, and of unpacking pippin's packed layout.

Shape letters: M rows, K inputs, N outputs, G groups.
"""

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from pippin.check import Case, NotThere
from pippin.check.families import Family, Single
from pippin.engines.torch.probes.bench import Bench, exact, gap, unequal

DENSE = "use dequantized weights: they are read as model.dtype while loading"


def int8_weights(bench: Bench, dtype: torch.dtype) -> Iterator[Case]:
    """int8 weights with a scale a row."""
    for m, k, n in ((1, 64, 96), (33, 576, 128)):
        x, codes_NK = bench.draw(m, k, dtype=dtype), _codes(n, k, -128, 127)
        scales_N = bench.draw(n, dtype=dtype, seed=2).abs()
        out = torch._weight_int8pack_mm(x, bench.put(codes_NK.to(torch.int8)), scales_N)
        wanted = exact(x) @ (exact(codes_NK) * exact(scales_N)[:, None]).T
        yield f"{m} x {k} x {n}", gap(out, wanted)


def int4_weights(bench: Bench, dtype: torch.dtype) -> Iterator[Case]:
    """int4 weights in groups, with scale and zero."""
    for group in (32, 64, 128):
        x, codes_NK = bench.draw(9, 256, dtype=dtype), _codes(64, 256, 0, 15)
        pairs = bench.draw(256 // group, 64, 2, dtype=dtype, seed=2)
        scales, zeros = (exact(pairs)[..., i].T.repeat_interleave(group, 1) for i in (0, 1))
        wanted = exact(x) @ ((exact(codes_NK) - 8) * scales + zeros).T
        yield f"groups of {group}", gap(_int4_product(bench, x, codes_NK, group, pairs), wanted)


def _int4_product(bench: Bench, x: Tensor, codes_NK: Tensor, group: int, pairs: Tensor) -> Tensor:
    if bench.device.type == "cpu":
        packed = torch._convert_weight_to_int4pack_for_cpu(codes_NK.to(torch.int32), 1)
        return torch._weight_int4pack_mm_for_cpu(x, packed, group, pairs)
    nibbles = (codes_NK[:, ::2] << 4 | codes_NK[:, 1::2]).to(torch.uint8)
    packed = torch._convert_weight_to_int4pack(bench.put(nibbles), 8)
    return torch._weight_int4pack_mm(x, packed, group, pairs)


def integers(bench: Bench) -> Iterator[Case]:
    """int8 times int8 into int32, exact."""
    a, b = _codes(32, 64, -128, 127), _codes(64, 32, -128, 127)
    out = torch._int_mm(bench.put(a.to(torch.int8)), bench.put(b.to(torch.int8)))
    yield "32 x 64 x 32", unequal(out, (a @ b).to(torch.int32))


def unpacking(bench: Bench) -> Iterator[Case]:
    """2-, 4- and 8-bit codes out of 32-bit words by shifts and masks."""
    for bits in (2, 4, 8):
        codes = _codes(16, 64, 0, 2**bits - 1)
        shifts = torch.arange(0, 32, bits)
        words = (codes.view(16, -1, 32 // bits) << shifts).sum(-1)
        words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
        shifted = bench.put(words)[..., None] >> bench.put(shifts.to(torch.int32))
        out = (shifted & (2**bits - 1)).flatten(1)
        yield f"{bits} bits", unequal(out, codes.to(torch.int32))


def dequantized(bench: Bench, dtype: torch.dtype) -> Iterator[Case]:
    """scale x code + bias in groups, then the product: pippin's quantized layout, dense."""
    x, codes_NK = bench.draw(5, 128, dtype=dtype), _codes(48, 128, 0, 15)
    scales, biases = (bench.draw(48, 4, 1, dtype=dtype, seed=s) for s in (1, 2))
    codes = bench.put(codes_NK.to(dtype)).view(48, 4, 32)
    weight = (codes * scales + biases).view(48, 128)
    grid = exact(codes_NK).view(48, 4, 32) * exact(scales) + exact(biases)
    yield "weights", gap(weight, grid.view(48, 128))
    yield "product", gap(x @ weight.T, exact(x) @ exact(weight).T)


def float8(bench: Bench) -> Iterator[Case]:
    """float32 to 8-bit floats and back: to nearest."""
    if bench.device.type == "mps":
        raise NotThere("MPS has no 8-bit floats")
    values = np.linspace(-400, 400, 999, dtype=np.float32)
    wanted = torch.from_numpy(values.astype(ml_dtypes.float8_e4m3fn).astype(np.float64))
    there = bench.put(torch.from_numpy(values)).to(torch.float8_e4m3fn)
    yield "e4m3", unequal(there.to(torch.float32), wanted)


def _codes(rows: int, columns: int, low: int, high: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(low, high + 1, (rows, columns), generator=generator)


FAMILIES = (
    Family(name="quantized.int8 weights", measure=int8_weights, remedy=DENSE, avoid=""),
    Family(name="quantized.int4 weights", measure=int4_weights, remedy=DENSE, avoid=""),
    Family(name="quantized.dequantized", measure=dequantized, remedy=DENSE, avoid=""),
    Single(name="quantized.integers", measure=integers, remedy=DENSE, avoid=""),
    Single(name="quantized.unpacking", measure=unpacking, remedy="unpack on the CPU", avoid=""),
    Single(name="quantized.float8", measure=float8, remedy='train.frozen_dtype = "auto"', avoid=""),
)
