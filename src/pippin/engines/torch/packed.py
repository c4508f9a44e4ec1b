"""Linears whose weight stays in codes: a few tokens are multiplied by the codes themselves.

More tokens, and training, take a dense copy that lives as long as the product. The CPU's kernels
are PyTorch's, those for CUDA in packed_cuda.py; a linear without one is dequantized while it loads.

Shape letters: N tokens, I inputs, O outputs, G groups, S inputs of one group.
"""

import abc
import functools
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from pippin.engines.torch.attention import prepare
from pippin.model.quantized import DenseView
from pippin.quantizers import Codes, Grid

FEW = 6  # more tokens than this are faster through a dense copy, which takes about a millisecond
BLOCK = 64  # outputs that the 4-bit kernel packs together
GROUPS = (32, 64, 128, 256)
PIECE = 1 << 18  # weights that are unpacked at a time: ten bytes each, which a cache holds


class PackedLinear(nn.Module, abc.ABC):
    """y = x W^T + bias. `dense()` is W in bfloat16, rounded once from code * scale + bias."""

    few_tokens = FEW

    def __init__(self, shape: tuple[int, int], bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = shape
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O)."""
        y = self.product(x)
        return y if self.bias is None else y + self.bias

    def product(self, x: Tensor) -> Tensor:
        """x W^T."""
        x_NI = x.reshape(-1, self.in_features)
        few = len(x_NI) <= self.few_tokens and not (x_NI.requires_grad and torch.is_grad_enabled())
        y_NO = self.few(x_NI.contiguous()) if few else self.many(x_NI)
        return y_NO.view(*x.shape[:-1], self.out_features)

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return next(self.buffers()).device

    def many(self, x_NI: Tensor) -> Tensor:
        """The product through a dense copy."""
        return _Product.apply(x_NI, self)

    @abc.abstractmethod
    def few(self, x_NI: Tensor) -> Tensor:
        """The product with the codes."""

    @abc.abstractmethod
    def dense(self) -> Tensor:
        """W, (O, I) bfloat16."""


class _Product(torch.autograd.Function):
    """Keeps nothing: the backward makes the dense copy again."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, packed: PackedLinear) -> Tensor:
        ctx.packed = packed
        return functional.linear(x_NI, packed.dense())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return grads[0] @ ctx.packed.dense(), None


class Int4Linear(PackedLinear):
    """Four bits in groups: half a byte a weight in the kernel's own order, scales and biases."""

    codes: Tensor
    pairs: Tensor
    scales: Tensor
    biases: Tensor

    def __init__(self, codes: Codes, bias: Tensor | None) -> None:
        super().__init__(codes.codes_OI.shape, bias)
        codes_OI = torch.from_numpy(codes.codes_OI.astype(np.int32))
        packed = torch._convert_weight_to_int4pack_for_cpu(codes_OI, 1)
        scales_OG, biases_OG = (_float32(part) for part in (codes.scales_OG, codes.biases_OG))
        self.group = self.in_features // scales_OG.shape[1]
        # The kernel computes (code - 8) * scale + zero.
        pairs_GO2 = torch.stack([scales_OG, biases_OG + 8 * scales_OG], -1).transpose(0, 1)
        self.register_buffer("codes", packed, persistent=False)
        self.register_buffer("pairs", pairs_GO2.to(torch.bfloat16).contiguous(), persistent=False)
        for name, part in (("scales", codes.scales_OG), ("biases", codes.biases_OG)):
            self.register_buffer(name, _as_stored(part)[..., None], persistent=False)

    def few(self, x_NI: Tensor) -> Tensor:
        """The kernel's product: (N, I) bfloat16 -> (N, O)."""
        return torch._weight_int4pack_mm_for_cpu(x_NI, self.codes, self.group, self.pairs)

    def dense(self) -> Tensor:
        """W, (O, I) bfloat16."""
        return _in_pieces(self, self._values)

    def _values(self, start: int, stop: int) -> Tensor:
        """Rows of W in float32, whole blocks of them."""
        order = kernel_order()
        assert order is not None
        bytes_BIH = self.codes.view(-1, self.in_features, BLOCK // 2)
        bytes_BIH = bytes_BIH[start // BLOCK : stop // BLOCK]
        nibbles = torch.cat([bytes_BIH & 15, bytes_BIH >> 4], -1)[..., order]
        codes_OGS = nibbles.transpose(1, 2).reshape(-1, self.in_features // self.group, self.group)
        scales, biases = (part[start:stop].float() for part in (self.scales, self.biases))
        return torch.addcmul(biases, codes_OGS.float(), scales).flatten(1)


class Int8Linear(PackedLinear):
    """Eight bits, symmetric, one scale an output: a byte a weight."""

    codes: Tensor
    scales: Tensor

    def __init__(self, codes: Codes, bias: Tensor | None) -> None:
        super().__init__(codes.codes_OI.shape, bias)
        signed_OI = torch.from_numpy(codes.codes_OI).view(torch.int8) ^ -128  # code - 128
        scales_O = _float32(codes.scales_OG)[:, 0].to(torch.bfloat16)
        self.register_buffer("codes", signed_OI, persistent=False)
        self.register_buffer("scales", scales_O, persistent=False)

    def few(self, x_NI: Tensor) -> Tensor:
        """The kernel's product: (N, I) bfloat16 -> (N, O)."""
        return torch._weight_int8pack_mm(x_NI, self.codes, self.scales)

    def dense(self) -> Tensor:
        """W, (O, I) bfloat16."""
        return _in_pieces(self, self._values)

    def _values(self, start: int, stop: int) -> Tensor:
        """Rows of W in float32."""
        return self.codes[start:stop].float() * self.scales[start:stop].float()[:, None]


def _in_pieces(linear: PackedLinear, values: Callable[[int, int], Tensor]) -> Tensor:
    """(O, I) bfloat16 from rows in float32, a few blocks of them at a time."""
    outputs, inputs = linear.out_features, linear.in_features
    weight_OI = torch.empty(outputs, inputs, dtype=torch.bfloat16)
    rows = max(1, PIECE // (BLOCK * inputs)) * BLOCK
    for start in range(0, outputs, rows):
        weight_OI[start : start + rows] = values(start, start + rows)
    return weight_OI


@functools.cache
def kernel_order() -> Tensor | None:
    """Where the 4-bit kernel puts the outputs of a block, found by packing their numbers.

    The layout depends on the processor. None where the kernel is not there, or packs otherwise than
    byte by byte.
    """
    numbers = torch.arange(BLOCK, dtype=torch.int32)[:, None].expand(BLOCK, 32)
    places = torch.zeros(BLOCK, dtype=torch.int64)
    for shift in (0, 4):
        try:
            packed = torch._convert_weight_to_int4pack_for_cpu(numbers >> shift & 15, 1)
        except (AttributeError, RuntimeError):
            return None
        bytes_IH = packed.reshape(32, BLOCK // 2)
        nibbles = torch.cat([bytes_IH & 15, bytes_IH >> 4], -1)
        places += nibbles[0].long() << shift
        if (nibbles != nibbles[0]).any():
            return None
    order = places.argsort()
    return order if torch.equal(places[order], torch.arange(BLOCK)) else None


def kernel_for(grid: Grid, shape: tuple[int, ...]) -> Callable[[Codes, Any], PackedLinear] | None:
    """What multiplies by such codes here; None where nothing does."""
    outputs, inputs = shape
    if grid.bits == 4 and grid.group_size in GROUPS and inputs % grid.group_size == 0:
        return Int4Linear if outputs % BLOCK == 0 and kernel_order() is not None else None
    if grid.bits == 8 and grid.symmetric and grid.per_channel:
        return Int8Linear
    return None


def packable(
    view: DenseView, linears: Collection[str], device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Tensor name -> kernel, of the quantized weights whose module is one of `linears`."""
    kernel_of = _kernels(device) if dtype == torch.bfloat16 else None
    if kernel_of is None:
        return {}
    found = {}
    for name, grid in view.grids.items():
        kernel = kernel_of(grid, view.tensors[name].shape)
        if kernel is not None and name.removesuffix(".weight") in linears:
            found[name] = kernel
    return found


def _kernels(device: torch.device) -> Any:
    if device.type == "cpu":
        return kernel_for
    if not prepare(device):
        return None
    from pippin.engines.torch import packed_cuda

    return packed_cuda.kernel_for


def pack(network: nn.Module, view: DenseView, kernels: dict[str, Any]) -> None:
    """Put packed linears in the places of the network's, whose weights are never read."""
    for name, kernel in kernels.items():
        parent, _, child = name.removesuffix(".weight").rpartition(".")
        module: Any = network.get_submodule(parent)
        linear = getattr(module, child)
        made = kernel(view.read_codes(name), linear.bias)
        setattr(module, child, made.to(linear.weight.device))


def _as_stored(array: Any) -> Tensor:
    exact = _float32(array)
    return exact.bfloat16() if array.dtype.name == "bfloat16" else exact


def _float32(array: Any) -> Tensor:
    return torch.from_numpy(array.astype(np.float32))
