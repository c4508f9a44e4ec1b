"""Triton kernels over packed codes: a weight made dense, and products of a few tokens.

Imported only where Triton is installed. A word of 32 bits holds 32 / BITS codes of a row, the
lowest bits first; a weight is code * scale + bias of its group, which is SPAN words long.

Shape letters: N tokens, I inputs, O outputs, G groups of a row, W words of a row.
"""

import triton  # ty: ignore[import-not-found]
import triton.language as tl  # ty: ignore[import-not-found]


@triton.jit
def make_dense(
    words, scales, biases, out, W, G,
    BITS: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out (O, I): a program writes BLOCK weights of a row."""
    per: tl.constexpr = 32 // BITS
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inputs = W * per
    inside = column < inputs
    word = tl.load(words + row * W + column // per, mask=inside, other=0)
    code = ((word >> (column % per * BITS)) & ((1 << BITS) - 1)).to(tl.float32)
    group = row * G + column // (SPAN * per)
    scale = tl.load(scales + group, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(biases + group, mask=inside, other=0.0).to(tl.float32)
    weight = (code * scale + bias).to(out.dtype.element_ty)
    tl.store(out + row * inputs + column, weight, mask=inside)


@triton.jit
def few_products(
    x, words, scales, biases, out, outputs, W, G,
    BITS: tl.constexpr, SPAN: tl.constexpr, OUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out (N, O) = x (N, I) times W transposed: a program takes OUTS outputs of a token."""
    per: tl.constexpr = 32 // BITS
    row = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    x += tl.program_id(1) * W * per
    total = tl.zeros([OUTS], tl.float32)
    for start in range(0, W, BLOCK):
        place = start + tl.arange(0, BLOCK)
        seen = (row < outputs)[:, None] & (place < W)[None, :]
        word = tl.load(words + row[:, None] * W + place[None, :], mask=seen, other=0)
        coded = tl.zeros([OUTS, BLOCK], tl.float32)
        plain = tl.zeros([BLOCK], tl.float32)
        for number in tl.static_range(per):
            value = tl.load(x + place * per + number, mask=place < W, other=0.0).to(tl.float32)
            coded += ((word >> (number * BITS)) & ((1 << BITS) - 1)).to(tl.float32) * value[None, :]
            plain += value
        group = row[:, None] * G + (place // SPAN)[None, :]
        scale = tl.load(scales + group, mask=seen, other=0.0).to(tl.float32)
        bias = tl.load(biases + group, mask=seen, other=0.0).to(tl.float32)
        total += tl.sum(coded * scale + plain[None, :] * bias, 1)
    target = out + tl.program_id(1) * outputs + row
    tl.store(target, total.to(out.dtype.element_ty), mask=row < outputs)
