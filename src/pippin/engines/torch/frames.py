"""A frozen matrix framed by its adapters, so that products with all of them are one product.

Shape letters: T tokens, I inputs, O outputs, R rank, E the frame's width (R and more).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pippin.engines.torch.float8 import CODES, round_rows
from pippin.engines.torch.lora import LoraLinear

STEP = 16  # the frame is a multiple of it: tensor cores and 16-byte loads


@dataclass(frozen=True, kw_only=True, slots=True)
class Wide:
    """Activations of `width` channels, in rows with room for a frame beside them.

    `whole` is (T, width + E), or None where nobody reads the values. `codes` (T, width) and `scale`
    (T, 1) are there where the product runs in FP8.
    """

    whole: Tensor | None
    width: int
    codes: Tensor | None = None
    scale: Tensor | None = None

    @property
    def rows(self) -> Tensor:
        """(T, width + E)."""
        assert self.whole is not None
        return self.whole

    @property
    def values(self) -> Tensor:
        """(T, width)."""
        return self.rows[:, : self.width]

    @property
    def tail(self) -> Tensor:
        """(T, E)."""
        return self.rows[:, self.width :]


class Frame:
    """Linears that read the same inputs, as one product: y = x W^T + bias + scale * x A^T B^T.

    The matrix is [[W, B], [A, 0]]. Its upper part times [x, scale * x A^T] is the output, its left
    part times [dy, scale * dy B] the input's gradient. A bias is one more column of B, beside
    a constant input of 1. `by_columns` says how the matrix lies in memory; FP8 has its own way.
    """

    def __init__(self, linears: Sequence[Any], float8: bool, *, by_columns: bool = False) -> None:
        self.linears, self.float8, self.by_columns = linears, float8, by_columns
        self.inputs = linears[0].in_features
        self.outputs = sum(linear.out_features for linear in linears)
        self.adapters = _adapters(linears)
        self.rank = sum(a.linear.lora_A.shape[0] for a in self.adapters)
        self.scale = self.adapters[0].linear.scale if self.adapters else 1.0
        biased = any(linear.bias is not None for linear in linears)
        self.extra = -(-(self.rank + biased) // STEP) * STEP
        self.span = slice(0, self.outputs)  # of the outputs that the frame reaches
        if self.adapters and not biased:
            self.span = slice(self.adapters[0].rows.start, self.adapters[-1].rows.stop)
        self.biased = biased
        self._build()

    @property
    def masters(self) -> list[nn.Parameter]:
        """lora_A and lora_B of every adapter in turn."""
        return [m for a in self.adapters for m in (a.linear.lora_A, a.linear.lora_B)]

    def _build(self) -> None:
        weight_OI = torch.cat([linear.weight.detach() for linear in self.linears])
        rows, columns = self.outputs + self.extra, self.inputs + self.extra
        if self.float8:
            self.forth, self.back = round_rows(weight_OI), round_rows(weight_OI.T.contiguous())
            self.below = weight_OI.new_zeros(self.extra, self.inputs)
            self.beside = weight_OI.new_zeros(self.outputs, self.extra)
        else:
            if self.by_columns:
                self.whole = _roomy(weight_OI, columns, rows).T.zero_()
            else:
                self.whole = _roomy(weight_OI, rows, columns).zero_()
            self.whole[: self.outputs, : self.inputs] = weight_OI
            self.below = self.whole[self.outputs :, : self.inputs]
            self.beside = self.whole[: self.outputs, self.inputs :]
        if self.biased:
            biases = [_bias(linear, weight_OI) for linear in self.linears]
            self.beside[:, self.rank] = torch.cat(biases)

    def adopt(self) -> None:
        """The linears' weights become views of this matrix; in FP8 they are given up."""
        row = 0
        for linear in self.linears:
            stop = row + linear.out_features
            if self.float8:
                linear.weight = nn.Parameter(linear.weight.new_empty(0), requires_grad=False)
            else:
                view = self.whole[row:stop, : self.inputs]
                linear.weight = nn.Parameter(view, requires_grad=False)
            row = stop

    @property
    def places(self) -> list[Tensor]:
        """Where the masters' values stand in the frame."""
        return [
            place
            for a in self.adapters
            for place in (self.below[a.ranks], self.beside[a.rows, a.ranks])
        ]

    def inner(self, tokens: int, *, keep: bool = False) -> Wide:
        """Room for `tokens` inputs; `keep` asks for their values even where no adapter does."""
        return self._room(tokens, self.inputs, keep)

    def outer(self, tokens: int, *, keep: bool = False) -> Wide:
        """The same for gradients of outputs."""
        return self._room(tokens, self.outputs, keep)

    def _room(self, tokens: int, width: int, keep: bool) -> Wide:
        empty = self.below.new_empty
        whole = None
        if keep or self.extra or not self.float8:
            whole = _roomy(self.below, tokens, width + self.extra)
        if not self.float8:
            return Wide(whole=whole, width=width)
        codes, scale = empty(tokens, width, dtype=CODES), empty(tokens, 1, dtype=torch.float32)
        return Wide(whole=whole, width=width, codes=codes, scale=scale)

    def product(self, x: Wide) -> Tensor:
        """(T, O). Fills the tail of `x` with scale * x A^T."""
        if self.extra:
            x.tail.addmm_(x.values, self.below.T, beta=0, alpha=self.scale)
            if self.biased:
                x.tail[:, self.rank] = 1.0
        if self.float8:
            y_TO = _in_float8(x, self.forth, self.beside.dtype)
            if self.extra:
                self.add(y_TO[:, self.span], x.tail, self.beside[self.span].T)
            return y_TO
        return x.rows @ self.whole[: self.outputs].T

    def wide_product(self, x: Wide) -> tuple[Tensor, Tensor]:
        """(T, O) without the adapters' update, and scale * x A^T (T, E) that it is made of.

        For inputs wider than outputs: x [W; A]^T reads them once.
        """
        both_TX = _roomy(self.below, len(x.rows), self.outputs + self.extra)
        torch.mm(x.values, self.whole[:, : self.inputs].T, out=both_TX)
        tail_TE = both_TX[:, self.outputs :] * self.scale
        if self.biased:
            tail_TE[:, self.rank] = 1.0
        return both_TX[:, : self.outputs], tail_TE

    def product_back(self, dy: Wide, x_TX: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """(T, I), the gradient of x, and those of the masters. `x_TX` is x's `whole`."""
        grads = self.grads(dy, x_TX)
        return self.back_through(dy), grads

    def back_through(self, dy: Wide) -> Tensor:
        """(T, I), the gradient of x, once the tail of `dy` is filled."""
        if self.float8:
            dx_TI = _in_float8(dy, self.back, self.below.dtype)
            return self.add(dx_TI, dy.tail, self.below) if self.extra else dx_TI
        return dy.rows @ self.whole[:, : self.inputs]

    def wide_back(self, dy: Wide) -> Tensor:
        """The same, and the tail filled on the way: where outputs are many, to read them once.

        dy [W, B] gives both; the adapters' part of the gradient is added to the narrower side.
        """
        both_TX = _roomy(self.below, len(dy.rows), self.inputs + self.extra)
        torch.mm(dy.values, self.whole[: self.outputs], out=both_TX)
        torch.mul(both_TX[:, self.inputs :], self.scale, out=dy.tail)
        return self.add(both_TX[:, : self.inputs], dy.tail, self.below)

    def add(self, y_TO: Tensor, tail_TE: Tensor, matrix_EO: Tensor) -> Tensor:
        """Their product is added to y."""
        return y_TO.addmm_(tail_TE, matrix_EO)

    def grads(self, dy: Wide, x_TX: Tensor | None) -> list[Tensor]:
        """Those of the masters alone; fills the tail of `dy`."""
        self.fill_back(dy)
        if not self.adapters:
            return []
        assert x_TX is not None
        below_EI = over_tokens(dy.tail, x_TX[:, : self.inputs])
        return self.split(below_EI, self.beside_grad(dy, x_TX[:, self.inputs :]))

    def fill_back(self, dy: Wide) -> None:
        """The tail of `dy` becomes scale * dy B."""
        if self.extra:
            narrow = self.beside[self.span]
            dy.tail.addmm_(dy.values[:, self.span], narrow, beta=0, alpha=self.scale)

    def beside_grad(self, dy: Wide, tail_TE: Tensor) -> Tensor:
        """Of B, over the outputs that the frame reaches; `tail_TE` is x's."""
        return over_tokens(dy.values[:, self.span], tail_TE)

    def split(self, below_EI: Tensor, beside_OE: Tensor) -> list[Tensor]:
        """The gradients of the masters from those of A and, over the frame's reach, of B."""
        grads: list[Tensor] = []
        for a in self.adapters:
            rows = slice(a.rows.start - self.span.start, a.rows.stop - self.span.start)
            grads += [below_EI[a.ranks], beside_OE[rows, a.ranks]]
        return grads


def over_tokens(left_TM: Tensor, right_TN: Tensor) -> Tensor:
    """(M, N), a sum over tokens. On CUDA it goes to masters in float32 without being rounded."""
    if left_TM.is_cuda and left_TM.dtype == torch.bfloat16:
        return torch.mm(left_TM.T, right_TN, out_dtype=torch.float32)
    return left_TM.T @ right_TN


def _in_float8(x: Wide, side: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    codes, scale = side
    assert x.codes is not None
    assert x.scale is not None
    return torch._scaled_mm(
        x.codes,
        codes.T,
        scale_a=x.scale,
        scale_b=scale.T,
        out_dtype=dtype,
        use_fast_accum=True,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Adapter:
    """One linear's pair, and its place in the frame."""

    linear: Any
    ranks: slice
    rows: slice


def _roomy(like: Tensor, rows: int, columns: int) -> Tensor:
    """Uninitialised (rows, columns); rows begin at multiples of 128 bytes: products are faster."""
    unit = 128 // like.element_size()
    return like.new_empty(rows, -(-columns // unit) * unit)[:, :columns]


def _adapters(linears: Sequence[Any]) -> list[_Adapter]:
    found, rank, row = [], 0, 0
    for linear in linears:
        if isinstance(linear, LoraLinear):
            ranks = slice(rank, rank + linear.lora_A.shape[0])
            rows = slice(row, row + linear.out_features)
            found.append(_Adapter(linear=linear, ranks=ranks, rows=rows))
            rank = ranks.stop
        row += linear.out_features
    return found


def _bias(linear: Any, weight_OI: Tensor) -> Tensor:
    if linear.bias is None:
        return weight_OI.new_zeros(linear.out_features)
    return linear.bias.detach()
