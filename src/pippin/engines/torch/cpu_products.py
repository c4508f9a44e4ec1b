"""Sums of matrix products on a CPU: our own where its registers are wide, else PyTorch's.

PyTorch's keep code and reordered matrices for every shape that they meet; ours read matrices where
they lie, and take adapters, biases and residuals along.

Shape letters: R rows, K inner, C columns.
"""

import functools
import struct
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from pippin.compiled import Compiled

HERE = Path(__file__)
TAILS = {torch.float32: "_f", torch.bfloat16: "_h"}
COMPILED = Compiled(
    source=HERE.with_suffix(".cpp"),
    headers=(HERE.with_name("cpu_numbers.h"),),
    flags="-fopenmp",
    signatures={f"products{tail}": "pf" for tail in TAILS.values()},
)
EXACT = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # of a product's size
Terms: TypeAlias = list[tuple[Tensor, Tensor]]


def ours(dtype: torch.dtype) -> bool:
    """Whether our products are the faster ones here, and right."""
    return _faster(dtype) and fault(dtype) is None


@functools.cache
def fault(dtype: torch.dtype) -> str | None:
    """How far our products are off where they would be faster, but this compiler or CPU errs."""
    if not _faster(dtype):
        return None
    drawn = torch.Generator().manual_seed(0)
    shapes = ((9, 66), (66, 50), (9, 34), (50, 34), (9, 50))
    a, b, c, turned, plus = (torch.randn(*shape, generator=drawn).to(dtype) for shape in shapes)
    out = torch.full_like(plus, torch.nan)
    _run(out, [(a, b), (c, turned.T)], plus, 0.5)
    left, right = torch.cat([a, c], dim=1).double(), torch.cat([b, turned.T]).double()
    # Summed plainly: a library's float64 product would keep tens of MB of buffers.
    wanted = 0.5 * (left[:, :, None] * right).sum(dim=1) + plus.double()
    off = float((out.double() - wanted).norm() / wanted.norm())
    return None if off <= EXACT[dtype] else f"ours are off float64's by {off:.1e} of their size"


@functools.cache
def _faster(dtype: torch.dtype) -> bool:
    """A CPU with tiles for matrices (AMX) has PyTorch's run in them."""
    if COMPILED.missing is not None:
        return False
    flags = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].split()
    if dtype == torch.float32:
        return "avx512f" in flags
    return dtype == torch.bfloat16 and "avx512_bf16" in flags and "amx_bf16" not in flags


def rows_of(dtype: torch.dtype) -> int:
    """Numbers of rows should be multiples of this.

    Units of ours are two bfloat16. oneDNN keeps code for every number of rows that it has met, 9 MB
    in 30 layers that are never given back.
    """
    return 2 if ours(dtype) else 16


def add_products(
    out_RC: Tensor, terms: Terms, plus: Tensor | None = None, scale: float = 1.0
) -> None:
    """out = scale * sum of a @ b + plus, for terms a (R, K) and b (K, C), each K its own.

    `plus` is (R, C) or (C,). `out_RC` may be float32 where the terms are bfloat16.
    """
    dtype, depths = terms[0][0].dtype, [b.shape[0] for _, b in terms]
    if ours(dtype) and all(depths) and (dtype == torch.float32 or not any(d % 2 for d in depths)):
        _run(out_RC, terms, plus, scale)
        return
    (a, b), *others = terms
    sum_RC = a @ b
    for a, b in others:
        sum_RC.addmm_(a, b)
    if scale != 1.0:
        sum_RC *= scale
    out_RC.copy_(sum_RC if plus is None else sum_RC + plus)


def _run(out_RC: Tensor, terms: Terms, plus: Tensor | None, scale: float) -> None:
    dtype, (rows, columns) = terms[0][0].dtype, out_RC.shape
    assert out_RC.dtype in (dtype, torch.float32)
    assert plus is None or (plus.dtype == dtype and plus.stride(-1) == 1)
    numbers = [
        out_RC.data_ptr(),
        0 if plus is None else plus.data_ptr(),
        *out_RC.stride(),
        out_RC.dtype != dtype,
        plus.stride(0) if plus is not None and plus.ndim == 2 else 0,
        rows,
        columns,
        len(terms),
    ]
    for a, b in terms:
        depth, (a_row, a_step), (b_row, b_column) = b.shape[0], a.stride(), b.stride()
        turned = b_column != 1
        assert a.dtype == b.dtype == dtype
        assert a.shape == (rows, depth)
        assert b.shape == (depth, columns)
        assert a_step == 1
        assert not turned or b_row == 1
        numbers += (a.data_ptr(), b.data_ptr(), a_row, b_column if turned else b_row, depth, turned)
    call = struct.pack(f"{len(numbers)}q", *numbers)
    getattr(COMPILED.library, "products" + TAILS[dtype])(call, scale)
