"""What lies between a decoder layer's products, as functions of tensors.

Shape letters: T tokens, D hidden, F feed-forward, O outputs of query, key and value.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pippin.engines.torch import layer_kernels as kernels
from pippin.engines.torch.frames import Frame, Wide
from pippin.engines.torch.parts import Norm

COPIED = 2048  # elements a program
SPLITS = 8  # of the tokens, where sums over them are made
GATE_TILE = {"M": 32, "N": 32, "num_warps": 2, "num_stages": 3}  # the fastest on Hopper


def norm(
    x_TD: Tensor, norm: Norm, out: Wide, add_TD: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Fill `out` with the RMS norm of x + add; returns that sum (T, D) and 1 / rms (T,) float32."""
    tokens, width = x_TD.shape
    rates_T = x_TD.new_empty(tokens, dtype=torch.float32)
    total_TD = x_TD if add_TD is None else torch.empty_like(x_TD)
    kernels.norm[(tokens,)](
        x_TD, x_TD if add_TD is None else add_TD, norm.weight_D, *_whole(out, x_TD), total_TD,
        rates_T, *_codes(out, x_TD), width, _row(out), norm.eps,
        ADD=add_TD is not None, KEEP=out.whole is not None, CODES=out.codes is not None,
        BLOCK=_power(width), num_warps=8,
    )  # fmt: skip
    return total_TD, rates_T


def norm_grad(
    grad_TD: Tensor, kept: tuple[Tensor, Tensor], norm: Norm, out: Wide, beside_TD: Tensor | None
) -> Tensor:
    """Fill `out` with the norm's gradient and `beside_TD`; returns its values (T, D).

    `kept` are the norm's input and 1 / rms.
    """
    x_TD, rates_T = kept
    tokens, width = x_TD.shape
    beside = grad_TD if beside_TD is None else beside_TD
    kernels.norm_grad[(tokens,)](
        grad_TD, x_TD, rates_T, norm.weight_D, beside, out.whole, *_codes(out, x_TD),
        width, grad_TD.stride(0), beside.stride(0), _row(out),
        ADD=beside_TD is not None, CODES=out.codes is not None, BLOCK=_power(width), num_warps=8,
    )  # fmt: skip
    return out.values


def gate(both_TF: Tensor, frame: Frame) -> Wide:
    """silu(gate) * up into what `frame` reads, from rows of gate and up (T, 2F)."""
    tokens, width = len(both_TF), both_TF.shape[1] // 2
    out = frame.inner(tokens)
    kernels.gate[(tokens,)](
        both_TF, *_whole(out, both_TF), *_codes(out, both_TF), width, both_TF.stride(0), _row(out),
        KEEP=out.whole is not None, CODES=out.codes is not None, **_two(width),
    )  # fmt: skip
    return out


def gate_grad(grad_TF: Tensor, both_TF: Tensor, frame: Frame) -> Wide:
    """The gradients of gate and up, (T, 2F), as what `frame` reads backwards."""
    tokens, width = grad_TF.shape
    out = frame.outer(tokens)
    kernels.gate_grad[(tokens,)](
        grad_TF, both_TF, *_whole(out, both_TF), *_codes(out, both_TF),
        width, both_TF.stride(0), _row(out),
        KEEP=out.whole is not None, CODES=out.codes is not None, **_two(width),
    )  # fmt: skip
    return out


def gate_grad_tiles(
    grad_TF: Tensor, both_TF: Tensor, frame: Frame, read_TE: Tensor, written_TR: Tensor
) -> tuple[Wide, Tensor, Tensor]:
    """`gate_grad`; what it times `read_TE` gives, (2F, E); the gated times `written_TR`, (R, F).

    Both are sums over tokens: gradients of the adapters on either side, with nothing read again.
    """
    (tokens, width), extra, rank = grad_TF.shape, read_TE.shape[1], written_TR.shape[1]
    out = frame.outer(tokens)
    part = -(-tokens // SPLITS)
    above = grad_TF.new_empty(SPLITS, 2 * width, extra, dtype=torch.float32)
    below = grad_TF.new_empty(SPLITS, width, rank, dtype=torch.float32)
    kernels.gate_grad_tiles[(-(-width // GATE_TILE["N"]), SPLITS)](
        grad_TF, both_TF, out.rows, read_TE, written_TR, above, below, tokens, width, extra, rank,
        both_TF.stride(0), _row(out), read_TE.stride(0), written_TR.stride(0), part,
        WIDE_E=_power(extra), WIDE_R=_power(rank), PRECISION=_precision(grad_TF), **GATE_TILE,
    )  # fmt: skip
    return out, above.sum(0), below.sum(0).T


def add_update(
    y_TD: Tensor, tail_TE: Tensor, matrix_ED: Tensor, beside_TD: Tensor | None = None
) -> Tensor:
    """y + tail matrix, in the place of y; with something beside, a new sum of all three."""
    (tokens, width), extra = y_TD.shape, tail_TE.shape[1]
    out_TD = y_TD if beside_TD is None else torch.empty_like(beside_TD)
    kernels.add_update[(-(-tokens // 64), -(-width // 128))](
        y_TD, y_TD if beside_TD is None else beside_TD, tail_TE, matrix_ED, out_TD,
        tokens, width, extra, y_TD.stride(0), tail_TE.stride(0), *matrix_ED.stride(),
        out_TD.stride(0), ADD=beside_TD is not None,
        M=64, N=128, WIDE_E=_power(extra), PRECISION=_precision(y_TD), num_warps=8,
    )  # fmt: skip
    return out_TD


class CudaFrame(Frame):
    """A frame whose updates are added by a kernel: cuBLAS takes half as long again."""

    def add(self, y_TO: Tensor, tail_TE: Tensor, matrix_EO: Tensor) -> Tensor:
        """As Frame.add."""
        return add_update(y_TO, tail_TE, matrix_EO)


def refresher(frames: Sequence[Frame]) -> Callable[[], None]:
    """What takes the adapters' newest values into their frames: all in one launch."""
    pairs = [pair for f in frames for pair in zip(f.masters, f.places, strict=True)]
    assert all(master.is_contiguous() for master, _ in pairs)
    rows = [[m.data_ptr(), p.data_ptr(), *m.shape, *p.stride()] for m, p in pairs]
    table = torch.tensor(rows, dtype=torch.int64, device=frames[0].below.device)
    blocks = -(-max([m.numel() for m, _ in pairs], default=0) // COPIED)

    def refresh() -> None:
        if pairs:
            kernels.copy_all[(blocks, len(pairs))](table, *pairs[0], BLOCK=COPIED, num_warps=8)

    return refresh


def rotate(x_TO: Tensor, cos_TC: Tensor, sin_TC: Tensor, heads: int, sign: float) -> None:
    """Turn the first `heads` heads of every row by their position's angles, in place."""
    channels = cos_TC.shape[1]
    some = 32
    kernels.rotate[(len(x_TO), -(-heads // some))](
        x_TO, cos_TC, sin_TC, x_TO.stride(0), heads, sign,
        C=channels, HALF=_power(channels // 2), HEADS=some, num_warps=8,
    )  # fmt: skip


def encode(x: Wide) -> Wide:
    """Fill the codes of values that are there already, where codes are wanted."""
    if x.codes is not None:
        values = x.values
        kernels.round_rows[(len(values),)](
            values, x.codes, x.scale, x.width, values.stride(0), **_two(x.width)
        )
    return x


def take(grad_TO: Tensor, frame: Frame) -> Wide:
    """A gradient of outputs as what `frame` reads backwards: copied, unless there is room beside.

    There is where it came out of `norm_grad`, which leaves the room empty.
    """
    out = frame.outer(len(grad_TO), keep=True)
    rows = out.rows
    alike = [
        (x.stride(), x.storage_offset(), x.untyped_storage().nbytes()) for x in (grad_TO, rows)
    ]
    if alike[0] == alike[1]:
        out = replace(out, whole=grad_TO.as_strided(rows.shape, rows.stride()))
    else:
        out.values.copy_(grad_TO)
    return encode(out)


class PlainNorm(torch.autograd.Function):
    """An RMS norm that no product of ours follows: (..., D) to the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """The weight is frozen."""
        x_TD = x.reshape(-1, x.shape[-1])
        out_TD, ctx.eps = torch.empty_like(x_TD), eps
        _, rates_T = norm(x_TD, Norm(weight_D, eps), Wide(whole=out_TD, width=x_TD.shape[1]))
        ctx.save_for_backward(x_TD, rates_T, weight_D)
        return out_TD.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Of x alone."""
        x_TD, rates_T, weight_D = ctx.saved_tensors
        grad_TD = grads[0].reshape(x_TD.shape).contiguous()
        out = Wide(whole=torch.empty_like(x_TD), width=x_TD.shape[1])
        dx_TD = norm_grad(grad_TD, (x_TD, rates_T), Norm(weight_D, ctx.eps), out, None)
        return dx_TD.view(grads[0].shape), None, None


def _whole(out: Wide, like: Tensor) -> tuple[Tensor]:
    return (like if out.whole is None else out.whole,)


def _codes(out: Wide, like: Tensor) -> tuple[Any, Any]:
    return (like, like) if out.codes is None else (out.codes, out.scale)


def _row(out: Wide) -> int:
    return 0 if out.whole is None else out.whole.stride(0)


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _power(width: int) -> int:
    return 1 << (width - 1).bit_length()


def _two(width: int) -> dict[str, int]:
    """A row in registers as two blocks: powers of two that leave few lanes idle."""
    most = 1 << (width.bit_length() - 1)
    rest = _power(max(width - most, 16))
    return {"MOST": most, "REST": rest, "num_warps": 16 if most > 8192 else 8}
