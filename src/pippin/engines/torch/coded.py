"""Linears of codes whose scales and zero points are trained: every forward is what is stored.

Shape letters: O outputs, I inputs, G groups, S weights that share a scale, N tokens.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from pippin.engines import Weights
from pippin.engines.coded import Scales, by_tensor, read_coded, tuned
from pippin.engines.torch.trainer import TorchTrainer
from pippin.model.quantized import DenseView
from pippin.recipe import Train


class CodedLinear(nn.Module):
    """y = x W^T + bias, W = code * scale + zero point. `moves` are what both have moved by."""

    def __init__(self, bias: Tensor | None, codes_OI: Tensor, scales: Scales) -> None:
        super().__init__()
        self.bias, self.codes_OI, self.scales = bias, codes_OI, scales
        self.rounded_to = getattr(torch, scales.dtype.name)
        self.first, self.added = (
            [torch.from_numpy(part).to(codes_OI.device) for part in parts]
            for parts in (scales.first, scales.added)
        )
        self.moves = nn.ParameterList([torch.zeros_like(self.first[0]) for _ in scales.parts])

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O)."""
        x_NI = x.reshape(-1, x.shape[-1])
        y_NO = _Product.apply(x_NI, self.codes_OI, *self.tuned())
        y = y_NO.view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias

    def tuned(self) -> tuple[Tensor, Tensor]:
        """Scales and biases (O, G) float32, as they would be stored."""
        bits = self.scales.grid.bits
        return tuned(bits, self.first, self.added, list(self.moves), self._rounded)

    @torch.no_grad()
    def stored(self) -> list[NDArray[Any]]:
        """Scales and biases that the forward computes with, as the layout has them."""
        return self.scales.stored([part.cpu().numpy() for part in self.tuned()])

    def _rounded(self, values: Tensor, least: float | None) -> Tensor:
        return Rounded.apply(values.clamp(min=least) if least else values, self.rounded_to)


class Rounded(torch.autograd.Function):
    """The nearest value of a dtype, in float32; its gradient is one."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, dtype: torch.dtype) -> Tensor:
        return value.to(dtype).float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return grads[0], None


class _Product(torch.autograd.Function):
    """Keeps the codes alone: the backward makes the dense weight again."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, *coded: Tensor) -> Tensor:
        ctx.save_for_backward(x_NI, *coded)
        return functional.linear(x_NI, _dense(*coded).to(x_NI.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x_NI, codes_OI, scale_OG, bias_OG = ctx.saved_tensors
        dy_NO, dx_NI = grads[0], None
        if ctx.needs_input_grad[0]:
            dx_NI = dy_NO @ _dense(codes_OI, scale_OG, bias_OG).to(dy_NO.dtype)
        pull_OGS = (dy_NO.T @ x_NI).float().view(*scale_OG.shape, -1)
        pull_OG = pull_OGS.sum(-1)
        return dx_NI, None, pull_OGS.mul_(codes_OI.view_as(pull_OGS)).sum(-1), pull_OG


def _dense(codes_OI: Tensor, scale_OG: Tensor, bias_OG: Tensor) -> Tensor:
    """float32, the same roundings as model.quantized.dequantize."""
    weight_OGS = codes_OI.view(*scale_OG.shape, -1).float()
    return weight_OGS.mul_(scale_OG[..., None]).add_(bias_OG[..., None]).view_as(codes_OI)


def take_codes(network: PreTrainedModel, view: DenseView, seed: int) -> dict[str, CodedLinear]:
    """Put a CodedLinear in the place of every quantized linear of the layers; them by name.

    Raises ModelError where the network has no such linear.
    """
    modules, coded = dict(network.named_modules()), {}
    for name, codes_OI, scales in read_coded(view, modules, seed, "transformers"):
        codes = torch.from_numpy(codes_OI).to(network.device)
        coded[name] = CodedLinear(modules[name].bias, codes, scales)
        network.set_submodule(name, coded[name])
    return coded


def stored(coded: Mapping[str, CodedLinear]) -> Weights:
    """Scales and biases by tensor name, as the layout stores them."""
    return by_tensor({name: linear.stored() for name, linear in coded.items()})


class CodesTrainer(TorchTrainer):
    """Trains the scales and zero points of the codes that a network was loaded from."""

    def __init__(
        self, network: PreTrainedModel, coded: Mapping[str, CodedLinear], train: Train, seed: int
    ) -> None:
        self.coded = coded
        moves = {
            f"{name}.moves.{i}": move
            for name, linear in coded.items()
            for i, move in enumerate(linear.moves)
        }
        super().__init__(network, moves, train, seed)

    def weights(self) -> Weights:
        """Scales and biases as they are stored, widened to float32, under their tensors' names."""
        return {name: array.astype(np.float32) for name, array in stored(self.coded).items()}
