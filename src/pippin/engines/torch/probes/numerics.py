"""Probes of single operations: rounding, functions, sums, order, copies between host and device."""

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from pippin.check import Case
from pippin.check.families import FLOAT32, Family, Single
from pippin.engines.torch.probes.bench import Bench, exact, gap, unequal

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)


def bfloat16_rounding(bench: Bench) -> Iterator[Case]:
    """float32 to bfloat16: to nearest, ties to even, infinities and NaN kept."""
    yield from _rounding(bench, torch.bfloat16, ml_dtypes.bfloat16, 16)


def float16_rounding(bench: Bench) -> Iterator[Case]:
    """float32 to float16: to nearest, ties to even, overflow to infinity."""
    yield from _rounding(bench, torch.float16, np.float16, 13)


def _rounding(bench: Bench, dtype: torch.dtype, kind: type, dropped: int) -> Iterator[Case]:
    values = _hard_to_round(dropped)
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = torch.from_numpy(values.astype(kind).astype(np.float32))
    yield (
        "ties, ends and 4,000 others",
        unequal(bench.put(torch.from_numpy(values)).to(dtype).float(), wanted),
    )


def _hard_to_round(dropped: int) -> NDArray[np.float32]:
    """Numbers halfway between two of the smaller dtype, their neighbours, ends, random ones."""
    rng = np.random.default_rng(0)
    half = np.uint32(1 << (dropped - 1))
    kept = rng.standard_normal(1000).astype(np.float32).view(np.uint32) >> dropped << dropped
    ties = np.concatenate([kept + half, kept + half - 1, kept + half + 1]).view(np.float32)
    ends = np.array([0.0, -0.0, 65504, 65519.996, 65520, 3.38e38, np.inf, -np.inf, np.nan])
    return np.concatenate([ties, ends, rng.standard_normal(1000) * 100]).astype(np.float32)


def functions(bench: Bench, dtype: torch.dtype) -> Iterator[Case]:
    """The functions that networks are made of, over the range they see."""
    x = bench.put(torch.linspace(-10, 10, 4001).to(dtype))
    names = ("exp", "tanh", "sigmoid", "silu", "gelu", "softplus", "relu")
    for name in names:
        function = getattr(functional, name, None) or getattr(torch, name)
        yield name, gap(function(x), function(exact(x)))
    positive = x.abs() + 0.01
    for name in ("log", "rsqrt", "sqrt", "reciprocal"):
        function = getattr(torch, name)
        yield name, gap(function(positive), function(exact(positive)))


def rotations(bench: Bench) -> Iterator[Case]:
    """sine and cosine of rotary angles up to position 131,071."""
    positions = torch.tensor([0, 1, 511, 4095, 32767, 131071])
    frequencies = 1e4 ** -(torch.arange(0, 64, 2) / 64)
    angles = bench.put((positions[:, None] * frequencies).float())
    yield "sine", gap(angles.sin(), exact(angles).sin())
    yield "cosine", gap(angles.cos(), exact(angles).cos())


def softmax(bench: Bench, dtype: torch.dtype) -> Iterator[Case]:
    """softmax and log-softmax of large values, of wide rows and of masked ones."""
    for width in (7, 1025, bench.shapes.vocab):
        x = bench.draw(5, width, dtype=dtype) * 30
        x[:, width // 2 :: 3] = torch.finfo(dtype).min
        yield f"softmax of {width}", gap(x.softmax(-1), exact(x).softmax(-1))
        yield f"logsumexp of {width}", gap(x.float().logsumexp(-1), exact(x).logsumexp(-1))


def norms(bench: Bench, dtype: torch.dtype) -> Iterator[Case]:
    """RMS and layer norms, rows of large and of tiny values among them."""
    for width in (64, 576, 3200):
        x = bench.draw(6, width, dtype=dtype)
        x[1] *= 200
        x[2] *= 0.01
        weight = bench.draw(width, dtype=dtype, seed=1)
        size = (width,)
        out = functional.rms_norm(x, size, weight, 1e-6)
        yield f"RMS of {width}", gap(out, functional.rms_norm(exact(x), size, exact(weight), 1e-6))
        out = functional.layer_norm(x, size, weight, None, 1e-5)
        wanted = functional.layer_norm(exact(x), size, exact(weight), None, 1e-5)
        yield f"layer norm of {width}", gap(out, wanted)


def sums(bench: Bench) -> Iterator[Case]:
    """Sums over many numbers and running sums."""
    x = bench.draw(1 << 20).abs()
    yield "1,048,576 numbers", gap(x.sum(), exact(x).sum())
    yield "mean", gap(x.mean(), exact(x).mean())
    rows = x.view(1024, 1024)
    yield "of columns", gap(rows.sum(0), exact(rows).sum(0))
    yield "running", gap(rows.cumsum(1), exact(rows).cumsum(1))


def repeated_sums(bench: Bench) -> Iterator[Case]:
    """Sums one right after the other, not waiting between them."""
    x = bench.draw(64, 513)
    outs = torch.stack([(x * scale).sum() for scale in range(1, 101)])
    wanted = exact(x).sum() * torch.arange(1, 101)
    yield "100 sums", gap(outs, wanted)


def order(bench: Bench) -> Iterator[Case]:
    """argmax, top-k and sort over a vocabulary: what picks the next token."""
    x = bench.draw(7, bench.shapes.vocab)
    host = x.cpu().numpy()
    descending = np.argsort(-host, 1, kind="stable")
    yield "argmax", unequal(x.argmax(-1), torch.from_numpy(descending[:, 0].copy()))
    values = torch.from_numpy(np.take_along_axis(host, descending, 1))
    yield "top-k", unequal(x.topk(50).values, values[:, :50])
    yield "sort", unequal(x.sort(-1, descending=True).values, values)


def transfers(bench: Bench) -> Iterator[Case]:
    """Numbers reach the device and come back unchanged, in every dtype and layout."""
    for dtype in DTYPES:
        wanted = torch.arange(600, dtype=torch.float64).remainder(251).view(20, 30)
        host = wanted.to(dtype)
        there = bench.put(host)
        name = str(dtype).removeprefix("torch.")
        yield name, unequal(there, wanted)
        yield f"{name}, transposed", unequal(there.T.contiguous(), wanted.T)
        yield f"{name}, sliced", unequal(there[3:17:2, 5:], wanted[3:17:2, 5:])
        yield f"{name}, slice copied", unequal(bench.put(host[:, 1::3]), wanted[:, 1::3])


def joins(bench: Bench, dtype: torch.dtype) -> Iterator[Case]:
    """Concatenation, padding, rolling and rotated halves: data moved, not computed."""
    x = bench.draw(3, 10, 16, dtype=dtype)
    for name, move in _MOVES.items():
        yield name, unequal(move(x), move(exact(x)))


def _rotated(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


_MOVES = {
    "concatenation": lambda x: torch.cat([x[:, :3], x[:, 7:].flip(1)], 1),
    "padding": lambda x: functional.pad(x, (1, 2, 3, 0)),
    "rolling": lambda x: x.roll(3, 1),
    "rotated halves": _rotated,
    "repeated heads": lambda x: x.repeat_interleave(3, 1),
    "triangle": lambda x: x.tril(-1),
}


def autocast(bench: Bench) -> Iterator[Case]:
    """Autocast computes in bfloat16 indeed."""
    a, b = bench.draw(8, 32), bench.draw(32, 8, seed=1)
    with torch.autocast(bench.device.type, torch.bfloat16):
        out = a @ b
    yield "dtype", 0.0 if out.dtype == torch.bfloat16 else float("inf")
    yield "product", gap(out, exact(a) @ exact(b))


FAMILIES = (
    Single(name="rounding.bfloat16", measure=bfloat16_rounding, remedy=FLOAT32, avoid="dtype"),
    Single(name="rounding.float16", measure=float16_rounding, remedy=FLOAT32, avoid="dtype"),
    Family(name="function.elementwise", measure=functions, remedy=FLOAT32, avoid="dtype"),
    Single(name="function.rotation", measure=rotations, tolerance=1e-6),
    Family(name="function.softmax", measure=softmax, remedy=FLOAT32, avoid="dtype"),
    Family(name="function.norm", measure=norms, remedy=FLOAT32, avoid="dtype"),
    Single(name="sum.many", measure=sums, tolerance=1e-5),
    Single(name="sum.repeated", measure=repeated_sums, tolerance=1e-4),
    Single(name="order.vocabulary", measure=order),
    Single(name="copy.transfers", measure=transfers),
    Family(name="copy.joins", measure=joins, tolerance=0.0),
    Single(
        name="autocast.bfloat16",
        measure=autocast,
        remedy="set model.dtype; pippin does not use autocast",
        tolerance=1.6e-2,
        avoid="",
    ),
)
