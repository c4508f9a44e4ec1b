"""Linears whose weight stays in codes on a CUDA device.

Shape letters: N tokens, I inputs, O outputs, G groups of a row, W words of a row.
"""

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pippin.engines.torch.packed import PackedLinear
from pippin.model import quantized
from pippin.quantizers import Codes, Grid

BITS = (2, 4, 8)  # no code lies in two words
FEW = 2  # more tokens are faster through a dense copy
TILE = {"OUTS": 4, "BLOCK": 256, "num_warps": 4}  # the fastest on Hopper


class CudaLinear(PackedLinear):
    """Codes in the words of MLX's layout, scales and biases as they are stored."""

    few_tokens = FEW
    words: Tensor
    scales: Tensor
    biases: Tensor

    def __init__(self, bits: int, codes: Codes, bias: Tensor | None) -> None:
        super().__init__(codes.codes_OI.shape, bias)
        self.bits = bits
        words_OW = torch.from_numpy(quantized.pack(codes.codes_OI, bits).view(np.int32))
        self.register_buffer("words", words_OW, persistent=False)
        for name, part in (("scales", codes.scales_OG), ("biases", codes.biases_OG)):
            exact = torch.from_numpy(part.astype(np.float32))
            stored = exact.bfloat16() if part.dtype.name == "bfloat16" else exact
            self.register_buffer(name, stored, persistent=False)

    def many(self, x_NI: Tensor) -> Tensor:
        """(N, I) -> (N, O) through a dense copy, which lives as long as the product."""
        return _Product.apply(x_NI, self.words, self.scales, self.biases, self.bits)

    def few(self, x_NI: Tensor) -> Tensor:
        """The product with the codes: (N, I) bfloat16 -> (N, O)."""
        from pippin.engines.torch.code_kernels import few_products

        tokens, (outputs, words), groups = len(x_NI), self.words.shape, self.scales.shape[1]
        y_NO = x_NI.new_empty(tokens, outputs)
        few_products[(-(-outputs // TILE["OUTS"]), tokens)](
            x_NI, self.words, self.scales, self.biases, y_NO,
            outputs, words, groups, BITS=self.bits, SPAN=words // groups, **TILE,
        )  # fmt: skip
        return y_NO

    def dense(self) -> Tensor:
        """W, (O, I) bfloat16."""
        return torch.ops.pippin.make_dense(self.words, self.scales, self.biases, self.bits)


class _Product(torch.autograd.Function):
    """Keeps the codes alone: the backward makes the dense copy again."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, *codes: Any) -> Tensor:
        *tensors, ctx.bits = codes
        ctx.save_for_backward(*tensors)
        return functional.linear(x_NI, torch.ops.pippin.make_dense(*codes))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        weight_OI = torch.ops.pippin.make_dense(*ctx.saved_tensors, ctx.bits)
        return grads[0] @ weight_OI, None, None, None, None


def kernel_for(grid: Grid, shape: tuple[int, ...]) -> Any:
    """What multiplies by such codes on CUDA; None where nothing does."""
    register()
    if grid.bits not in BITS or shape[1] % (32 // grid.bits):
        return None
    group = shape[1] if grid.per_channel else grid.group_size
    return functools.partial(CudaLinear, grid.bits) if group % (32 // grid.bits) == 0 else None


@functools.cache
def register() -> None:
    """Make `torch.ops.pippin.make_dense` known: compiled code takes it as it is."""
    operator = torch.library.custom_op(
        "pippin::make_dense",
        _make_dense,
        mutates_args=(),
        schema="(Tensor words, Tensor scales, Tensor biases, int bits) -> Tensor",
    )
    operator.register_fake(lambda words, scales, biases, bits: _empty(words, bits))


def _make_dense(words: Tensor, scales: Tensor, biases: Tensor, bits: int) -> Tensor:
    from pippin.engines.torch.code_kernels import make_dense

    weight_OI, block = _empty(words, bits), 1024
    (outputs, width), groups = words.shape, scales.shape[1]
    make_dense[(outputs, -(-weight_OI.shape[1] // block))](
        words, scales, biases, weight_OI, width, groups,
        BITS=bits, SPAN=width // groups, BLOCK=block,
    )  # fmt: skip
    return weight_OI


def _empty(words: Tensor, bits: int) -> Tensor:
    outputs, count = words.shape
    return words.new_empty(outputs, count * (32 // bits), dtype=torch.bfloat16)
