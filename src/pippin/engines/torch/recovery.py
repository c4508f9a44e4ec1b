"""Scales and zero points of codes, tuned until the predictions are the parent's again.

What reads codes is a linear whose weight is code x scale + middle, group by group; scales and
middles follow the gradient of the KL divergence from the parent's predictions. Held-out rows say
whether it was worth it.

Shape letters: O outputs, I inputs, G groups, N real tokens, C some of them, D hidden, V vocabulary.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pippin.engines import Recovered, Weights
from pippin.engines.torch.body import hidden_states
from pippin.engines.torch.loss import Head
from pippin.engines.torch.rows import Rows
from pippin.errors import ModelError
from pippin.model import names
from pippin.model.quantized import DenseView
from pippin.quantizers import Codes, Grid
from pippin.quantizers.groups import MIN_SCALE, finish, symmetric_bias

# Adam's step in shares of a scale: its largest, after some updates and before it falls to nothing.
LEARNING_RATE, WARMUP, BETAS = 4e-4, 3, (0.9, 0.95)
# A mean's gradients are too small for half precision, and a factor is nothing to Adam.
GAIN = 256.0


class _Dense(torch.autograd.Function):
    """code x scale + middle in the model's dtype; codes alone are kept for the way back."""

    @staticmethod
    def forward(ctx: Any, codes_OI: Tensor, scale_OG: Tensor, middle_OG: Tensor, dtype: Any) -> Any:
        ctx.save_for_backward(codes_OI)
        ctx.groups = scale_OG.shape[1]
        weight_OGS = _grouped(codes_OI, ctx.groups).float()
        weight_OGS.mul_(scale_OG[..., None]).add_(middle_OG[..., None])
        return weight_OGS.reshape(codes_OI.shape).to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (codes_OI,) = ctx.saved_tensors
        pull_OGS = _grouped(gradients[0], ctx.groups).float()
        middle_OG = pull_OGS.sum(-1)
        return None, pull_OGS.mul_(_grouped(codes_OI, ctx.groups)).sum(-1), middle_OG, None


def _grouped(values_OI: Tensor, groups: int) -> Tensor:
    return values_OI.reshape(len(values_OI), groups, -1)


class CodedLinear(nn.Module):
    """A linear of codes. `moves` are what its scales and middles have moved by, in scales."""

    def __init__(
        self, bias: Tensor | None, codes: Codes, grid: Grid, like: PreTrainedModel
    ) -> None:
        super().__init__()
        self.bias, self.dtype, device = bias, like.dtype, like.device
        self.stored, self.grid, self.half = codes, grid, 2 ** (grid.bits - 1)
        step = codes.scales_OG.shape[1] if grid.per_channel else 1
        scales_OG, biases_OG = (
            part[:, ::step].astype(np.float32) for part in (codes.scales_OG, codes.biases_OG)
        )
        codes_OI = codes.codes_OI.astype(np.int16) - self.half
        self.codes_OI = torch.from_numpy(codes_OI.astype(np.int8)).to(device)
        self.scale_OG = torch.from_numpy(scales_OG).to(device)
        self.middle_OG = torch.from_numpy(biases_OG + self.half * scales_OG).to(device)
        moved = 1 if grid.symmetric else 2
        self.moves = nn.ParameterList([torch.zeros_like(self.scale_OG) for _ in range(moved)])

    def forward(self, x: Tensor) -> Tensor:
        """As a linear does."""
        weight_OI = _Dense.apply(self.codes_OI, *self.tuned(), self.dtype)
        return nn.functional.linear(x, weight_OI, self.bias)

    def tuned(self) -> tuple[Tensor, Tensor]:
        """Scales, which stay positive, and middles."""
        scale_OG = (self.scale_OG * (1 + self.moves[0])).clamp(min=MIN_SCALE)
        if self.grid.symmetric:
            return scale_OG, self.middle_OG
        return scale_OG, self.middle_OG + self.scale_OG * self.moves[1]

    @torch.no_grad()
    def settle(self, rng: np.random.Generator) -> Codes:
        """Round what was tuned to the stored dtype, and go on with that.

        At random between the two nearest values: moves are smaller than the steps between them,
        and would be undone by rounding to the nearest.
        """
        dtype = self.stored.scales_OG.dtype
        tuned = [part.cpu().numpy() for part in self.tuned()]
        scales_OG = round_at_random(tuned[0], dtype, rng)
        biases_OG = symmetric_bias(scales_OG, self.grid.bits)
        if not self.grid.symmetric:
            biases_OG = round_at_random(tuned[1] - self.half * scales_OG, dtype, rng)
        self.scale_OG.copy_(torch.from_numpy(scales_OG))
        self.middle_OG.copy_(torch.from_numpy(biases_OG + self.half * scales_OG))
        for move in self.moves:
            move.zero_()
        codes_OGS = self.stored.codes_OI.reshape(*scales_OG.shape, -1)
        return finish(codes_OGS, (scales_OG, biases_OG), self.grid, dtype)


def round_at_random(values: Any, dtype: np.dtype[Any], rng: np.random.Generator) -> Any:
    """float32 that `dtype` holds: one of the two neighbours of each, the nearer the likelier."""
    near = values.astype(dtype)
    toward = np.where(near.astype(np.float32) < values, np.inf, -np.inf).astype(dtype)
    far = np.nextafter(near, toward).astype(np.float32)
    near = near.astype(np.float32)
    share = np.abs(values - near) / np.abs(far - near)
    return np.where(rng.random(values.shape) < share, far, near)


class Recovery:
    """A network that becomes the quantized one, and its parent's last hidden states by batch."""

    def __init__(self, network: PreTrainedModel, head: Head, batches: Sequence[Rows]) -> None:
        self.network, self.head, self.batches = network.requires_grad_(False), head, batches
        self.parent = replace(head, weight_VD=head.weight_VD.clone())
        with torch.no_grad():
            self.wanted = [self.hidden(rows) for rows in batches]

    def hidden(self, rows: Rows) -> Tensor:
        """(N, D) what the head reads."""
        hidden_BTD = hidden_states(self.network, rows.tokens_BT, **rows.extra)
        return hidden_BTD.reshape(-1, hidden_BTD.shape[-1])[rows.real_N]

    def take(self, folder: Path) -> dict[str, CodedLinear]:
        """Every weight of the quantized folder; the layers' coded linears by name."""
        view, coded = DenseView(folder), dict[str, CodedLinear]()
        parameters = dict(self.network.named_parameters())
        modules = dict(self.network.named_modules())
        for name in view.tensors:
            module = names.module(name)
            if module not in modules:
                raise ModelError(
                    f"transformers loads {name} under another name than the checkpoint",
                    "set quantize.recover_tokens = 0",
                )
            if name in view.grids and names.layer(name) is not None:
                coded[module] = CodedLinear(
                    modules[module].bias, view.read_codes(name), view.grids[name], self.network
                )
                self.network.set_submodule(module, coded[module])
            else:
                dense = torch.from_numpy(view.read(name).astype(np.float32))
                parameters[name].data.copy_(dense)
        return coded

    @torch.no_grad()
    def divergence(self, held_out: range) -> float:
        """KL from the parent on some batches, in nats a token."""
        pairs = [(self.hidden(self.batches[i]), self.wanted[i]) for i in held_out]
        return sum(self.pull(*pair)[0] for pair in pairs) / sum(len(h) for h, _ in pairs)

    @torch.no_grad()
    def pull(self, hidden_ND: Tensor, wanted_ND: Tensor) -> tuple[float, Tensor]:
        """KL in nats over all tokens, and its gradient by the hidden states."""
        total, pull_ND = 0.0, torch.empty_like(hidden_ND)
        for start in range(0, len(hidden_ND), self.head.chunk):
            some = slice(start, start + self.head.chunk)
            parent_CV = self.parent.logits(wanted_ND[some]).log_softmax(-1)
            logits_CV = self.head.logits(hidden_ND[some])
            child_CV = logits_CV.log_softmax(-1)
            total += float((parent_CV.exp() * (parent_CV - child_CV)).sum())
            moved_CV = child_CV.exp_().sub_(parent_CV.exp_())
            slope = self.head.slope(logits_CV)
            if slope is not None:
                moved_CV *= slope
            pull_ND[some] = moved_CV.to(hidden_ND.dtype) @ self.head.weight_VD
        return total, pull_ND

    def tune(self, moves: Sequence[nn.Parameter], updates: range) -> None:
        """One update of Adam a batch."""
        optimizer = torch.optim.Adam(moves, lr=LEARNING_RATE, betas=BETAS)
        for done, i in enumerate(updates):
            rise = min(1.0, (done + 1) / WARMUP)
            fall = 0.5 * (1 + math.cos(math.pi * done / len(updates)))
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * rise * fall
            with torch.enable_grad():
                hidden_ND = self.hidden(self.batches[i])
            pull_ND = self.pull(hidden_ND.detach(), self.wanted[i])[1]
            hidden_ND.backward(pull_ND / len(pull_ND) * GAIN)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def recover(
    network: PreTrainedModel, head: Head, folder: Path, batches: Sequence[Rows], seed: int
) -> Recovered:
    """Tune on all batches but the last eighth, which says what it gave: nothing, maybe."""
    recovery = Recovery(network, head, batches)
    coded = recovery.take(folder)
    first = len(batches) - max(1, len(batches) // 8)
    held_out = range(first, len(batches))
    before = recovery.divergence(held_out)
    recovery.tune([move for linear in coded.values() for move in linear.moves], range(first))
    rng = np.random.default_rng(seed)
    settled = {name: linear.settle(rng) for name, linear in coded.items()}
    after = recovery.divergence(held_out)
    weights = _weights(settled) if after < before else {}
    tokens = sum(len(recovery.wanted[i]) for i in held_out)
    return Recovered(weights=weights, before=before, after=after, tokens=tokens)


def _weights(settled: Mapping[str, Codes]) -> Weights:
    scales = {f"{name}.scales": codes.scales_OG for name, codes in settled.items()}
    return scales | {f"{name}.biases": codes.biases_OG for name, codes in settled.items()}
