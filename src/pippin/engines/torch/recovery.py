"""Scales and zero points of codes, and norms, tuned until the predictions are the parent's again.

They follow the gradient of the KL divergence from the parent's predictions. Held-out rows say
whether it was worth it.

Shape letters: N real tokens, C some of them, D hidden, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from transformers import PreTrainedModel

from pippin.engines import Recovered
from pippin.engines.coded import dither
from pippin.engines.torch.body import hidden_states
from pippin.engines.torch.coded import CodedLinear, Rounded, stored, take_codes
from pippin.engines.torch.loss import Head
from pippin.engines.torch.rows import Rows
from pippin.model import names
from pippin.model.quantized import DenseView

# Adam's step in shares of a scale, or of a norm's size: its largest, after some updates and before
# it falls to nothing.
LEARNING_RATE, WARMUP, BETAS = 4e-4, 3, (0.9, 0.95)
# A mean's gradients are too small for half precision, and a factor is nothing to Adam.
GAIN = 256.0


class TunedNorm(nn.Module):
    """The weight of a norm as it would be stored, from what it has moved by in shares of its size.

    Where a value rounds over to the next is fixed for each, as it is for scales.
    """

    def __init__(self, norm: nn.Module, first_D: NDArray[Any], rng: np.random.Generator) -> None:
        super().__init__()
        weight_D = norm.get_parameter("weight")
        self.dtype, self.used_as, device = first_D.dtype, weight_D.dtype, weight_D.device
        self.first_D = torch.from_numpy(first_D.astype(np.float32)).to(device)
        self.added_D = torch.from_numpy(dither(first_D, rng)).to(device)
        self.size = self.first_D.square().mean().sqrt()
        self.move_D = norm.weight = nn.Parameter(torch.zeros_like(self.first_D))
        # Unsafe: a move is float32, and the weight in its place need not be.
        register_parametrization(norm, "weight", self, unsafe=True)

    def forward(self, move_D: Tensor) -> Tensor:
        """(D,) in the network's dtype."""
        moved_D = self.first_D + self.size * move_D + self.added_D
        return Rounded.apply(moved_D, getattr(torch, self.dtype.name)).to(self.used_as)

    @torch.no_grad()
    def stored(self) -> NDArray[Any]:
        """What the forward computes with, as the folder has it."""
        return self(self.move_D).float().cpu().numpy().astype(self.dtype)


class Recovery:
    """A network that becomes the quantized one, and its parent's last hidden states by batch."""

    def __init__(self, network: PreTrainedModel, head: Head, batches: Sequence[Rows]) -> None:
        self.network, self.head, self.batches = network.requires_grad_(False), head, batches
        self.norms = dict[str, TunedNorm]()
        self.parent = replace(head, weight_VD=head.weight_VD.clone())
        with torch.no_grad():
            self.wanted = [self.hidden(rows) for rows in batches]

    def hidden(self, rows: Rows) -> Tensor:
        """(N, D) what the head reads."""
        hidden_BTD = hidden_states(self.network, rows.tokens_BT, **rows.extra)
        return hidden_BTD.reshape(-1, hidden_BTD.shape[-1])[rows.real_N]

    def take(self, folder: Path, seed: int) -> dict[str, CodedLinear]:
        """Every weight of the quantized folder, norms to be tuned; the coded linears by name."""
        view, rng = DenseView(folder), np.random.default_rng(seed)
        coded = take_codes(self.network, view, seed)
        parameters = dict(self.network.named_parameters())
        for name, spec in view.tensors.items():
            module = names.module(name)
            if module in coded:
                continue
            weight = view.read(name)
            parameters[name].data.copy_(torch.from_numpy(weight.astype(np.float32)))
            if len(spec.shape) == 1 and name.endswith(".weight"):
                norm = self.network.get_submodule(module)
                self.norms[name] = TunedNorm(norm, weight, rng)
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

    def tune(self, moves: Sequence[nn.Parameter], updates: Sequence[int]) -> None:
        """One update of Adam a batch, by their numbers."""
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
    """Tune on all batches but every eighth; what they say of norms, and of all else, decides."""
    recovery = Recovery(network, head, batches)
    coded = recovery.take(folder, seed)
    # Batches come longest first: whatever length rows have, some are held out.
    held_out = range(min(7, len(batches) - 1), len(batches), 8)
    rest = [i for i in range(len(batches)) if i not in held_out]
    before = recovery.divergence(held_out)
    moves = [move for linear in coded.values() for move in linear.moves]
    moves += [norm.move_D for norm in recovery.norms.values()]
    recovery.tune(moves, np.random.default_rng(seed).permutation(rest).tolist())
    after = recovery.divergence(held_out)
    norms = {name: norm.stored() for name, norm in recovery.norms.items()}
    for norm in recovery.norms.values():
        norm.move_D.data.zero_()
    without = recovery.divergence(held_out)
    if without <= after:  # norms are few, and sway everything
        after, norms = without, {}
    weights = stored(coded) | norms if after < before else {}
    tokens = sum(len(recovery.wanted[i]) for i in held_out)
    return Recovered(weights=weights, before=before, after=after, tokens=tokens)
