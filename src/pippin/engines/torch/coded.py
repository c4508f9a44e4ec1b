"""Linears of codes whose scales and zero points are trained: every forward is what is stored.

A scale or bias is trained in float32 and rounded to the stored dtype before it is used; gradients
pass the rounding as if it were not there. The codes stay as the quantizer chose them.

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
from pippin.engines.torch.trainer import TorchTrainer
from pippin.errors import ModelError
from pippin.model import names
from pippin.model.quantized import DenseView
from pippin.quantizers import Codes, Grid
from pippin.quantizers.groups import MIN_SCALE, finish
from pippin.recipe import Train


class CodedLinear(nn.Module):
    """y = x W^T + bias, W = code * scale + zero point. `moves` are what both have moved by.

    They count in scales, from 0; a move shifts the middle of a grid, not its lower end. Where a
    value rounds over to the next is fixed by `rng`, elsewhere for each: a move smaller than the
    step between two stored values takes its share of all values one step on.
    """

    def __init__(
        self,
        bias: Tensor | None,
        codes: Codes,
        grid: Grid,
        like: PreTrainedModel,
        rng: np.random.Generator,
    ) -> None:
        super().__init__()
        self.bias, self.grid, self.zero = bias, grid, 2 ** (grid.bits - 1)
        self.stored = codes.scales_OG.dtype
        step = codes.scales_OG.shape[1] if grid.per_channel else 1
        first = [part[:, ::step] for part in (codes.scales_OG, codes.biases_OG)]
        self.rounded_to = getattr(torch, self.stored.name)
        self.codes_OI = torch.from_numpy(codes.codes_OI).to(like.device)
        self.first = [_on(like, part.astype(np.float32)) for part in first]
        self.dither = [_on(like, dither(part, rng)) for part in first]
        moved = 1 if grid.symmetric else 2
        self.moves = nn.ParameterList([torch.zeros_like(self.first[0]) for _ in range(moved)])

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O)."""
        x_NI = x.reshape(-1, x.shape[-1])
        y_NO = _Product.apply(x_NI, self.codes_OI, *self.tuned())
        y = y_NO.view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias

    def tuned(self) -> tuple[Tensor, Tensor]:
        """Scales, which stay positive, and biases (O, G) float32, as they would be stored."""
        scale_OG, bias_OG = self.first
        tuned_OG = scale_OG + scale_OG * self.moves[0] + self.dither[0]
        tuned_OG = _Rounded.apply(tuned_OG.clamp(min=MIN_SCALE), self.rounded_to)
        if self.grid.symmetric:
            return tuned_OG, -self.zero * tuned_OG
        bias_OG = bias_OG + scale_OG * (self.moves[1] - self.zero * self.moves[0])
        return tuned_OG, _Rounded.apply(bias_OG + self.dither[1], self.rounded_to)

    @torch.no_grad()
    def codes(self) -> Codes:
        """What the forward computes with, as it is stored."""
        grids = [part.cpu().numpy() for part in self.tuned()]
        codes_OGS = self.codes_OI.cpu().numpy().reshape(*grids[0].shape, -1)
        return finish(codes_OGS, (grids[0], grids[1]), self.grid, self.stored)


class _Rounded(torch.autograd.Function):
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


def dither(stored: NDArray[Any], rng: np.random.Generator) -> NDArray[np.float32]:
    """What is added to values before they are rounded: less than takes a stored one to another."""
    toward_zero = np.nextafter(stored, np.zeros_like(stored)).astype(np.float32)
    step = np.abs(stored.astype(np.float32) - toward_zero)
    return step * rng.uniform(-0.49, 0.49, step.shape).astype(np.float32)


def _on(network: PreTrainedModel, array: NDArray[np.float32]) -> Tensor:
    return torch.from_numpy(array).to(network.device)


def take_codes(network: PreTrainedModel, view: DenseView, seed: int) -> dict[str, CodedLinear]:
    """Put a CodedLinear in the place of every quantized linear of the layers; them by name.

    Raises ModelError where the network has no such linear.
    """
    modules, rng = dict(network.named_modules()), np.random.default_rng(seed)
    coded: dict[str, CodedLinear] = {}
    for name in (name for name in view.grids if names.layer(name) is not None):
        module = names.module(name)
        if module not in modules:
            raise ModelError(
                f"transformers loads {name} under another name than the checkpoint",
                "set quantize.recover_tokens = 0 and qat.steps = 0",
            )
        linear = CodedLinear(
            modules[module].bias, view.read_codes(name), view.grids[name], network, rng
        )
        network.set_submodule(module, linear)
        coded[module] = linear
    return coded


def stored(coded: Mapping[str, CodedLinear]) -> Weights:
    """Scales and biases by tensor name, as the layout stores them."""
    codes = {name: linear.codes() for name, linear in coded.items()}
    scales = {f"{name}.scales": made.scales_OG for name, made in codes.items()}
    return scales | {f"{name}.biases": made.biases_OG for name, made in codes.items()}


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
