"""Triton kernels for CUDA: attention over packed samples, and the loss of rows of logits in place.

Imported only where Triton is installed; PyTorch brings it along on CUDA.

Shape letters: H heads, T tokens, C head channels, M query rows of a tile, N keys of a tile.
"""

import triton  # ty: ignore[import-not-found]
import triton.language as tl  # ty: ignore[import-not-found]

NEVER = tl.constexpr(-1e30)  # below all scores; unlike -inf it can be subtracted from itself


@triton.jit
def _tile(x, rows, columns, stride, count, C: tl.constexpr, UNIT: tl.constexpr):
    """(rows, columns) of a matrix, zeros outside it. Strides count in UNIT elements.

    What the compiler sees multiplied by UNIT it loads in words of UNIT elements.
    """
    inside = (rows[:, None] < count) & (columns[None, :] < C)
    return tl.load(x + rows[:, None] * stride * UNIT + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _put(x, rows, columns, stride, count, C: tl.constexpr, UNIT: tl.constexpr, values):
    inside = (rows[:, None] < count) & (columns[None, :] < C)
    target = x + rows[:, None] * stride * UNIT + columns[None, :]
    tl.store(target, values.to(x.dtype.element_ty), mask=inside)


@triton.jit
def attention(
    q, k, v, out, lse, first,
    q_t, q_h, k_t, k_h, v_t, v_h, o_t, o_h,
    T, window, scale,
    GROUPS: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head: softmax over the keys of their own samples.

    `first` (T,) is where the sample of every token begins. `lse` (H, T) takes the log-sum-exp to
    base 2; `scale` is to base 2 as well.
    """
    start, head = tl.program_id(0) * M, tl.program_id(1)
    rows, columns = start + tl.arange(0, M), tl.arange(0, WIDTH)
    query = _tile(q + head * q_h * UNIT, rows, columns, q_t, T, C, UNIT)
    k += head // GROUPS * k_h * UNIT
    v += head // GROUPS * v_h * UNIT
    begin = tl.maximum(tl.load(first + rows, mask=rows < T, other=T), rows - window + 1)
    low = tl.maximum(tl.load(first + start), start - window + 1)
    top = tl.full([M], NEVER, tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, WIDTH], tl.float32)
    for block in range(low, tl.minimum(start + M, T), N):
        keys = block + tl.arange(0, N)
        key = _tile(k, keys, columns, k_t, T, C, UNIT)
        value = _tile(v, keys, columns, v_t, T, C, UNIT)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        seen = (keys[None, :] >= begin[:, None]) & (keys[None, :] <= rows[:, None])
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1) * scale)
        power = tl.exp2(score * scale - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(power, 1)
        sums = sums * shrink[:, None]
        sums = tl.dot(power.to(value.dtype), value, sums, input_precision=PRECISION)
        top = higher
    _put(out + head * o_h * UNIT, rows, columns, o_t, T, C, UNIT, sums / total[:, None])
    tl.store(lse + head * T + rows, top + tl.log2(total), mask=rows < T)


@triton.jit
def attention_dq(
    q, k, v, out, lse, first, do, dq, delta,
    q_t, q_h, k_t, k_h, v_t, v_h, o_t, o_h, do_t, do_h, dq_t, dq_h,
    T, window, scale, slope,
    GROUPS: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of the queries' gradient; leaves `delta` (H, T), the rows' sums of out * do."""
    start, head = tl.program_id(0) * M, tl.program_id(1)
    rows, columns = start + tl.arange(0, M), tl.arange(0, WIDTH)
    query = _tile(q + head * q_h * UNIT, rows, columns, q_t, T, C, UNIT)
    grad = _tile(do + head * do_h * UNIT, rows, columns, do_t, T, C, UNIT)
    result = _tile(out + head * o_h * UNIT, rows, columns, o_t, T, C, UNIT)
    inner = tl.sum(result.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(delta + head * T + rows, inner, mask=rows < T)
    norm = tl.load(lse + head * T + rows, mask=rows < T, other=0.0)
    k += head // GROUPS * k_h * UNIT
    v += head // GROUPS * v_h * UNIT
    begin = tl.maximum(tl.load(first + rows, mask=rows < T, other=T), rows - window + 1)
    low = tl.maximum(tl.load(first + start), start - window + 1)
    sums = tl.zeros([M, WIDTH], tl.float32)
    for block in range(low, tl.minimum(start + M, T), N):
        keys = block + tl.arange(0, N)
        key = _tile(k, keys, columns, k_t, T, C, UNIT)
        value = _tile(v, keys, columns, v_t, T, C, UNIT)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        seen = (keys[None, :] >= begin[:, None]) & (keys[None, :] <= rows[:, None])
        weight = tl.where(seen, tl.exp2(score * scale - norm[:, None]), 0.0)
        d_weight = tl.dot(grad, tl.trans(value), input_precision=PRECISION)
        d_score = weight * (d_weight - inner[:, None])
        sums = tl.dot(d_score.to(key.dtype), key, sums, input_precision=PRECISION)
    _put(dq + head * dq_h * UNIT, rows, columns, dq_t, T, C, UNIT, sums * slope)


@triton.jit
def attention_dkv(
    q, k, v, lse, delta, last, do, dk, dv,
    q_t, q_h, k_t, k_h, v_t, v_h, do_t, do_h, dk_t, dk_h, dv_t, dv_h,
    T, window, scale, slope,
    GROUPS: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of the gradients of keys and values; `last` (T,) is where every sample ends."""
    start, kv = tl.program_id(0) * N, tl.program_id(1)
    keys, columns = start + tl.arange(0, N), tl.arange(0, WIDTH)
    key = _tile(k + kv * k_h * UNIT, keys, columns, k_t, T, C, UNIT)
    value = _tile(v + kv * v_h * UNIT, keys, columns, v_t, T, C, UNIT)
    end = tl.minimum(start + N, T) - 1
    high = tl.minimum(tl.load(last + end), end + window)
    final = tl.minimum(tl.load(last + keys, mask=keys < T, other=0), keys + window)
    d_key = tl.zeros([N, WIDTH], tl.float32)
    d_value = tl.zeros([N, WIDTH], tl.float32)
    for head in range(kv * GROUPS, kv * GROUPS + GROUPS):
        for block in range(start // M * M, high, M):
            rows = block + tl.arange(0, M)
            query = _tile(q + head * q_h * UNIT, rows, columns, q_t, T, C, UNIT)
            grad = _tile(do + head * do_h * UNIT, rows, columns, do_t, T, C, UNIT)
            inside = rows < T
            norm = tl.load(lse + head * T + rows, mask=inside, other=0.0)
            inner = tl.load(delta + head * T + rows, mask=inside, other=0.0)
            score = tl.dot(key, tl.trans(query), input_precision=PRECISION)
            seen = (rows[None, :] >= keys[:, None]) & (rows[None, :] < final[:, None])
            weight = tl.where(seen, tl.exp2(score * scale - norm[None, :]), 0.0)
            d_value = tl.dot(weight.to(grad.dtype), grad, d_value, input_precision=PRECISION)
            d_weight = tl.dot(value, tl.trans(grad), input_precision=PRECISION)
            d_score = weight * (d_weight - inner[None, :])
            d_key = tl.dot(d_score.to(query.dtype), query, d_key, input_precision=PRECISION)
    _put(dk + kv * dk_h * UNIT, keys, columns, dk_t, T, C, UNIT, d_key * slope)
    _put(dv + kv * dv_h * UNIT, keys, columns, dv_t, T, C, UNIT, d_value)


@triton.jit
def _finish(x, scale, cap, CAPPED: tl.constexpr):
    """From products to logits; tanh through a sigmoid."""
    x = x.to(tl.float32) * scale
    return cap * (2.0 * tl.sigmoid(2.0 * x / cap) - 1.0) if CAPPED else x


@triton.jit
def part_sums(
    products, targets, sums, picked, V, stride, scale, cap,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The log-sum-exp of BLOCK classes of a row, into `sums` (rows, parts).

    `picked` (rows,) takes the target's logit.
    """
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place = part * BLOCK + tl.arange(0, BLOCK)
    inside = place < V
    raw = tl.load(products + row * stride + place, mask=inside, other=0.0)
    x = tl.where(inside, _finish(raw, scale, cap, CAPPED), NEVER)
    top = tl.max(x, 0)
    tl.store(sums + row * tl.num_programs(0) + part, top + tl.log(tl.sum(tl.exp(x - top), 0)))
    if part == 0:
        target = tl.load(products + row * stride + tl.load(targets + row))
        tl.store(picked + row, _finish(target, scale, cap, CAPPED))


@triton.jit
def cross_entropy(
    products, targets, sums, losses, V, stride, count, scale, cap,
    CAPPED: tl.constexpr, WANTED: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """`losses` turn from the targets' logits into losses; where `WANTED`, products into gradients.

    The last rows come first: the cache still holds them.
    """
    part = tl.program_id(0)
    row = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    number = tl.arange(0, PARTS)
    parts = tl.load(sums + row * count + number, mask=number < count, other=NEVER)
    top = tl.max(parts, 0)
    whole = top + tl.log(tl.sum(tl.exp(parts - top), 0))
    if part == 0:
        tl.store(losses + row, whole - tl.load(losses + row))
    if WANTED:
        place = part * BLOCK + tl.arange(0, BLOCK)
        here = products + row * stride + place
        x = _finish(tl.load(here, mask=place < V, other=0.0), scale, cap, CAPPED)
        grad = tl.exp(x - whole) - tl.where(place == tl.load(targets + row), 1.0, 0.0)
        slope = (1.0 - x * x / (cap * cap)) * scale if CAPPED else scale
        tl.store(here, (grad * slope).to(products.dtype.element_ty), mask=place < V)
