"""The kernels as functions of tensors, and as operators that torch.compile takes as they are.

Shape letters: B 1, H heads, K kv heads, T tokens, C head channels, S positions, V vocabulary.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pippin.engines.torch import kernels

LOG2E = math.log2(math.e)
CLASSES = {"BLOCK": 8192, "num_warps": 8}  # of a row in a program's registers: fast on Hopper
SCHEMA = "Tensor q, Tensor k, Tensor v, Tensor first, Tensor last, float scale, int window"


@functools.cache
def register() -> None:
    """Make `torch.ops.pippin.attend` known: packed attention with its backward."""
    forward = torch.library.custom_op(
        "pippin::attend", _attend, mutates_args=(), schema=f"({SCHEMA}) -> (Tensor, Tensor)"
    )
    forward.register_fake(lambda q, *_: (_like_out(q), _row_sums(q)))
    forward.register_autograd(_backward, setup_context=_save)
    backward = torch.library.custom_op(
        "pippin::attend_backward",
        _attend_backward,
        mutates_args=(),
        schema=f"(Tensor grad, Tensor out, Tensor lse, {SCHEMA}) -> (Tensor, Tensor, Tensor)",
    )
    backward.register_fake(lambda grad, out, lse, q, k, v, *_: tuple(map(_like_input, (q, k, v))))


def attend(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    """(1, H, T, C), (1, K, T, C) -> (1, T, H, C). `rest` is first_T, last_T, scale, window.

    `first_T` and `last_T` int32 tell for every token where its sample begins and ends; a token sees
    itself and the `window - 1` before it.
    """
    return torch.ops.pippin.attend(query, key, value, *rest)[0]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*output, *tensors)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    operator = torch.ops.pippin.attend_backward
    grads = operator(grad, *ctx.saved_tensors, ctx.scale, ctx.window)
    return (*grads, None, None, None, None)


def _attend(*inputs: Any) -> tuple[Tensor, Tensor]:
    q, k, v, first, last, scale, window = inputs
    out = _like_out(q)
    return out, attend_forward(q, k, v, out, first, last, scale, window)


def attend_forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, *rest: Any) -> Tensor:
    """Fill `out` (1, T, H, C); returns the rows' log-sum-exp, (H, T) float32. `rest` as above."""
    first, _, scale, window = rest
    lse = _row_sums(q)
    operands = (q, k, v, out.transpose(1, 2))
    constants = _constants(operands)
    strides = [s // constants["UNIT"] for x in operands for s in _strides(x)]
    tile = _tiles(q, constants["UNIT"])["forward"]
    kernels.attention[(-(-q.shape[2] // tile["M"]), q.shape[1])](
        q, k, v, out, lse, first, *strides,
        q.shape[2], window, scale * LOG2E, **constants, **tile,
    )  # fmt: skip
    return lse


def _attend_backward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    grad, out, lse, q, k, v, *rest = inputs
    dq, dk, dv = map(_like_input, (q, k, v))
    attend_backward(grad.contiguous(), (out, lse), (q, k, v), (dq, dk, dv), *rest)
    return dq, dk, dv


def attend_backward(
    grad: Tensor, kept: Sequence[Tensor], qkv: Sequence[Tensor], grads: Sequence[Tensor], *rest: Any
) -> None:
    """Fill `grads`, those of query, key and value. `rest` as above.

    `grad` (1, T, H, C) is the output's; `kept` are the output and what the forward returned.
    """
    (out, lse), (q, k, v), (dq, dk, dv) = kept, qkv, grads
    first, last, scale, window = rest
    delta, length = torch.empty_like(lse), q.shape[2]
    operands = (q, k, v, out.transpose(1, 2), grad.transpose(1, 2), dq, dk, dv)
    constants = _constants(operands)
    q_s, k_s, v_s, out_s, do_s, dq_s, dk_s, dv_s = (
        [s // constants["UNIT"] for s in _strides(x)] for x in operands
    )
    numbers = (length, window, scale * LOG2E, scale)
    tiles = _tiles(q, constants["UNIT"])
    tile = tiles["dq"]
    kernels.attention_dq[(-(-length // tile["M"]), q.shape[1])](
        q, k, v, out, lse, first, grad, dq, delta,
        *q_s, *k_s, *v_s, *out_s, *do_s, *dq_s, *numbers, **constants, **tile,
    )  # fmt: skip
    tile = tiles["dkv"]
    kernels.attention_dkv[(-(-length // tile["N"]), k.shape[1])](
        q, k, v, lse, delta, last, grad, dk, dv,
        *q_s, *k_s, *v_s, *do_s, *dk_s, *dv_s, *numbers, **constants, **tile,
    )  # fmt: skip


def _strides(x: Tensor) -> tuple[int, int]:
    """Of tokens and of heads, in (1, H, T, C)."""
    assert x.stride(3) == 1, "head channels lie next to each other"
    return x.stride(2), x.stride(1)


def _constants(operands: tuple[Tensor, ...]) -> dict[str, Any]:
    q, k = operands[:2]
    channels = q.shape[3]
    return {
        "GROUPS": q.shape[1] // k.shape[1],
        "C": channels,
        "WIDTH": max(16, 1 << (channels - 1).bit_length()),
        "UNIT": math.gcd(8, *(s for x in operands for s in _strides(x))),
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }


def _tiles(q: Tensor, unit: int) -> dict[str, dict[str, int]]:
    """Rows and keys of a tile, warps and pipeline stages, by kernel: the fastest on Hopper.

    Small tiles: samples of a few hundred tokens leave much of a large one empty.
    """
    if q.dtype == torch.float32 or q.shape[3] > 128:
        small = {"M": 32, "N": 32, "num_warps": 4, "num_stages": 1}
        return {"forward": small, "dq": small, "dkv": small}
    return {
        "forward": {"M": 64, "N": 32, "num_warps": 4, "num_stages": 3 if unit == 8 else 2},
        "dq": {"M": 64, "N": 32, "num_warps": 4, "num_stages": 1},
        "dkv": {"M": 32, "N": 64, "num_warps": 4, "num_stages": 3 if unit == 8 else 1},
    }


def _like_out(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3])


def _row_sums(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[1], q.shape[2], dtype=torch.float32)


def _like_input(x: Tensor) -> Tensor:
    return _like_out(x).transpose(1, 2)


def row_losses(
    products_SV: Tensor, targets_S: Tensor, scale: float, softcap: float | None, *, wanted: bool
) -> Tensor:
    """(S,) float32 losses in nats; where `wanted`, the products become their gradient in place."""
    (rows, classes), stride = products_SV.shape, products_SV.stride(0)
    parts = -(-classes // CLASSES["BLOCK"])
    sums_SP = torch.empty(rows, parts, dtype=torch.float32, device=products_SV.device)
    losses_S = torch.empty(rows, dtype=torch.float32, device=products_SV.device)
    given = (products_SV, targets_S, sums_SP, losses_S, classes, stride)
    options = {"CAPPED": softcap is not None, **CLASSES}
    kernels.part_sums[(parts, rows)](*given, scale, softcap or 1.0, **options)
    kernels.cross_entropy[(parts if wanted else 1, rows)](
        *given, parts, scale, softcap or 1.0,
        WANTED=wanted, PARTS=1 << (parts - 1).bit_length(), **options,
    )  # fmt: skip
    return losses_S
