"""Triton kernels for what lies between a decoder layer's products, one program a token.

Imported only where Triton is installed. Every kernel that feeds a product can also leave the
values' FP8 codes and their row's scale.

Shape letters: D hidden, F feed-forward, H heads, C head channels.
"""

import triton  # ty: ignore[import-not-found]
import triton.language as tl  # ty: ignore[import-not-found]

LARGEST = tl.constexpr(448.0)  # of FP8 e4m3
SMALLEST = tl.constexpr(1e-12)


@triton.jit
def _put_codes(codes, place, inside, values, scale):
    level = tl.minimum(tl.maximum(values / scale, -LARGEST), LARGEST)
    tl.store(codes + place, level.to(codes.dtype.element_ty), mask=inside)


@triton.jit
def norm(
    x, add, weight, out, total, rates, codes, scales, D, out_row, eps,
    ADD: tl.constexpr, KEEP: tl.constexpr, CODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """total = x + add; out = total / rms(total), rounded, times weight. `rates` takes 1 / rms."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < D
    value = tl.load(x + row * D + place, mask=inside, other=0.0)
    if ADD:
        more = tl.load(add + row * D + place, mask=inside, other=0.0)
        value = (value.to(tl.float32) + more.to(tl.float32)).to(value.dtype)
        tl.store(total + row * D + place, value, mask=inside)
    wide = value.to(tl.float32)
    rate = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
    tl.store(rates + row, rate)
    factor = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    normed = (wide * rate).to(value.dtype).to(tl.float32) * factor
    if KEEP:
        tl.store(out + row * out_row + place, normed.to(out.dtype.element_ty), mask=inside)
    if CODES:
        scale = tl.maximum(tl.max(tl.abs(normed), 0) / LARGEST, SMALLEST)
        tl.store(scales + row, scale)
        _put_codes(codes + row * D, place, inside, normed, scale)


@triton.jit
def norm_grad(
    grad, x, rates, weight, beside, out, codes, scales, D, grad_row, beside_row, out_row,
    ADD: tl.constexpr, CODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = beside + the gradient of the norm's input, from the gradient of its output."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < D
    rate = tl.load(rates + row)
    normed = tl.load(x + row * D + place, mask=inside, other=0.0).to(tl.float32) * rate
    inner = tl.load(grad + row * grad_row + place, mask=inside, other=0.0).to(tl.float32)
    inner *= tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(inner * normed, 0) / D
    result = (inner - normed * mean) * rate
    if ADD:
        result += tl.load(beside + row * beside_row + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_row + place, result.to(out.dtype.element_ty), mask=inside)
    if CODES:
        scale = tl.maximum(tl.max(tl.abs(result), 0) / LARGEST, SMALLEST)
        tl.store(scales + row, scale)
        _put_codes(codes + row * D, place, inside, result, scale)


@triton.jit
def _row_scale(scales, row, first, second):
    """The scale that puts the largest of two blocks' values at FP8's end; stored."""
    top = tl.maximum(tl.max(tl.abs(first), 0), tl.max(tl.abs(second), 0))
    scale = tl.maximum(top / LARGEST, SMALLEST)
    tl.store(scales + row, scale)
    return scale


@triton.jit
def _gated(rows, place, inside, F):
    gate = tl.load(rows + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(rows + F + place, mask=inside, other=0.0).to(tl.float32)
    return gate * tl.sigmoid(gate) * up


@triton.jit
def gate(
    both, out, codes, scales, F, both_row, out_row,
    KEEP: tl.constexpr, CODES: tl.constexpr, MOST: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """out = silu(gate) * up, from rows that hold gate and up side by side."""
    row = tl.program_id(0).to(tl.int64)
    both += row * both_row
    out += row * out_row
    codes += row * F
    place, after = tl.arange(0, MOST), MOST + tl.arange(0, REST)
    first, second = _gated(both, place, place < F, F), _gated(both, after, after < F, F)
    if KEEP:
        tl.store(out + place, first.to(out.dtype.element_ty), mask=place < F)
        tl.store(out + after, second.to(out.dtype.element_ty), mask=after < F)
    if CODES:
        scale = _row_scale(scales, row, first, second)
        _put_codes(codes, place, place < F, first, scale)
        _put_codes(codes, after, after < F, second, scale)


@triton.jit
def _gate_slopes(grad, both, place, inside, F):
    """The gradients of gate and up, and silu(gate) * up."""
    g = tl.load(both + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(both + F + place, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
    chance = tl.sigmoid(g)
    silu = g * chance
    return d * u * (chance + silu * (1.0 - chance)), d * silu, silu * u


@triton.jit
def gate_grad(
    grad, both, out, codes, scales, F, both_row, out_row,
    KEEP: tl.constexpr, CODES: tl.constexpr, MOST: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """The gradients of gate and up side by side, from that of silu(gate) * up."""
    row = tl.program_id(0).to(tl.int64)
    both += row * both_row
    grad += row * F
    out += row * out_row
    codes += row * 2 * F
    place, after = tl.arange(0, MOST), MOST + tl.arange(0, REST)
    d_gate, d_up, _ = _gate_slopes(grad, both, place, place < F, F)
    gate_rest, up_rest, _ = _gate_slopes(grad, both, after, after < F, F)
    if KEEP:
        tl.store(out + place, d_gate.to(out.dtype.element_ty), mask=place < F)
        tl.store(out + F + place, d_up.to(out.dtype.element_ty), mask=place < F)
        tl.store(out + after, gate_rest.to(out.dtype.element_ty), mask=after < F)
        tl.store(out + F + after, up_rest.to(out.dtype.element_ty), mask=after < F)
    if CODES:
        most = tl.maximum(tl.abs(d_gate), tl.abs(d_up))
        scale = _row_scale(scales, row, most, tl.maximum(tl.abs(gate_rest), tl.abs(up_rest)))
        _put_codes(codes, place, place < F, d_gate, scale)
        _put_codes(codes + F, place, place < F, d_up, scale)
        _put_codes(codes, after, after < F, gate_rest, scale)
        _put_codes(codes + F, after, after < F, up_rest, scale)


@triton.jit(do_not_specialize=["T", "tokens"])
def gate_grad_tiles(
    grad, both, out, read, written, above, below, T, F, E, R,
    both_row, out_row, read_row, written_row, tokens,
    M: tl.constexpr, N: tl.constexpr, WIDE_E: tl.constexpr, WIDE_R: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`gate_grad` by tiles, with the gradients of the adapters on both sides while they are there.

    A program takes N channels of `tokens` tokens. `above` (splits, 2F, E) takes the gates' and ups'
    gradients times `read` (T, E); `below` (splits, F, R) silu(gate) * up times `written` (T, R).
    """
    channel = tl.program_id(0) * N + tl.arange(0, N)
    inside = channel < F
    e, r = tl.arange(0, WIDE_E), tl.arange(0, WIDE_R)
    gate_sum = tl.zeros([N, WIDE_E], tl.float32)
    up_sum = tl.zeros([N, WIDE_E], tl.float32)
    below_sum = tl.zeros([N, WIDE_R], tl.float32)
    split = tl.program_id(1)
    for block in range(0, tokens, M):
        row = split * tokens + block + tl.arange(0, M)
        row = tl.where(block + tl.arange(0, M) < tokens, row, T).to(tl.int64)
        real = row < T
        seen = inside[:, None] & real[None, :]
        d_gate, d_up, h = _gate_slopes(
            grad + row[None, :] * F, both + row[None, :] * both_row, channel[:, None], seen, F
        )
        d_gate, d_up = d_gate.to(out.dtype.element_ty), d_up.to(out.dtype.element_ty)
        place = out + row[None, :] * out_row + channel[:, None]
        tl.store(place, d_gate, mask=seen)
        tl.store(place + F, d_up, mask=seen)
        known = real[:, None] & (e < E)[None, :]
        tail = tl.load(read + row[:, None] * read_row + e[None, :], mask=known, other=0.0)
        gate_sum = tl.dot(d_gate, tail, gate_sum, input_precision=PRECISION)
        up_sum = tl.dot(d_up, tail, up_sum, input_precision=PRECISION)
        known = real[:, None] & (r < R)[None, :]
        tail = tl.load(written + row[:, None] * written_row + r[None, :], mask=known, other=0.0)
        below_sum = tl.dot(h.to(tail.dtype), tail, below_sum, input_precision=PRECISION)
    above += (split * 2 * F + channel[:, None]) * E + e[None, :]
    known = inside[:, None] & (e < E)[None, :]
    tl.store(above, gate_sum, mask=known)
    tl.store(above + F * E, up_sum, mask=known)
    known = inside[:, None] & (r < R)[None, :]
    tl.store(below + (split * F + channel[:, None]) * R + r[None, :], below_sum, mask=known)


@triton.jit(do_not_specialize=["T"])
def add_update(
    y, beside, tail, matrix, out, T, D, E, y_row, tail_row, matrix_row, matrix_column, out_row,
    ADD: tl.constexpr, M: tl.constexpr, N: tl.constexpr, WIDE_E: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out (T, D) = y + beside + tail (T, E) times matrix (E, D)."""
    row = (tl.program_id(0) * M + tl.arange(0, M)).to(tl.int64)[:, None]
    column, e = tl.program_id(1) * N + tl.arange(0, N), tl.arange(0, WIDE_E)
    known = (row < T) & (e < E)[None, :]
    left = tl.load(tail + row * tail_row + e[None, :], mask=known, other=0.0)
    known = (e < E)[:, None] & (column < D)[None, :]
    right = tl.load(
        matrix + e[:, None] * matrix_row + column[None, :] * matrix_column, mask=known, other=0.0
    )
    seen = (row < T) & (column < D)[None, :]
    total = tl.dot(left, right, input_precision=PRECISION)
    total += tl.load(y + row * y_row + column[None, :], mask=seen, other=0.0).to(tl.float32)
    if ADD:
        total += tl.load(beside + row * D + column[None, :], mask=seen, other=0.0).to(tl.float32)
    tl.store(out + row * out_row + column[None, :], total.to(out.dtype.element_ty), mask=seen)


@triton.jit
def rotate(
    x, cos, sin, row_stride, H, sign,
    C: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """The first H heads of a row, rotated in place by their position's angles times `sign`."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    place = tl.arange(0, HALF)
    half: tl.constexpr = C // 2
    c = tl.load(cos + row * C + place, mask=place < half, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + row * C + place, mask=place < half, other=0.0).to(tl.float32)[None, :] * sign
    target = x + row * row_stride + head[:, None] * C + place[None, :]
    inside = (head[:, None] < H) & (place[None, :] < half)
    left = tl.load(target, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(target + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, (left * c - right * s).to(x.dtype.element_ty), mask=inside)
    tl.store(target + half, (right * c + left * s).to(x.dtype.element_ty), mask=inside)


@triton.jit
def copy_all(table, like, like_target, BLOCK: tl.constexpr):
    """Matrices of the dtype of `like`, row by row, into others of the dtype of `like_target`.

    A row of `table` (n, 6) int64: from where, to where, rows, columns, the target's strides.
    """
    entry = table + tl.program_id(1) * 6
    rows, columns = tl.load(entry + 2), tl.load(entry + 3)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < rows * columns
    source = tl.load(entry).to(like.dtype) + place
    target = tl.load(entry + 1).to(like_target.dtype)
    target += place // columns * tl.load(entry + 4) + place % columns * tl.load(entry + 5)
    tl.store(target, tl.load(source, mask=inside).to(like_target.dtype.element_ty), mask=inside)


@triton.jit
def round_rows(x, codes, scales, D, x_row, MOST: tl.constexpr, REST: tl.constexpr):
    """FP8 codes of every row, and its scale."""
    row = tl.program_id(0).to(tl.int64)
    x += row * x_row
    codes += row * D
    place, after = tl.arange(0, MOST), MOST + tl.arange(0, REST)
    first = tl.load(x + place, mask=place < D, other=0.0).to(tl.float32)
    second = tl.load(x + after, mask=after < D, other=0.0).to(tl.float32)
    scale = _row_scale(scales, row, first, second)
    _put_codes(codes, place, place < D, first, scale)
    _put_codes(codes, after, after < D, second, scale)
