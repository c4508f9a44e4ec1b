"""Scales, zero points and norms on their way to the parent's predictions, in PyTorch.

Shape letters: N real tokens, C some of them, D hidden, V vocabulary.
"""

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

from pippin.engines import Weights
from pippin.engines.recovery import BETAS, GAIN, Norm, read_norms
from pippin.engines.torch.body import hidden_states
from pippin.engines.torch.coded import Rounded, stored, take_codes
from pippin.engines.torch.lora import LoraLinear
from pippin.engines.torch.loss import Head
from pippin.engines.torch.rows import Rows
from pippin.model import names
from pippin.model.quantized import DenseView


class TunedNorm(nn.Module):
    """A norm's weight as it would be stored, from what it has moved by in shares of its size."""

    def __init__(self, module: nn.Module, norm: Norm) -> None:
        super().__init__()
        weight_D = module.get_parameter("weight")
        self.dtype, self.used_as, self.size = norm.dtype, weight_D.dtype, norm.size
        self.first_D, self.added_D = (
            torch.from_numpy(part).to(weight_D.device) for part in (norm.first_D, norm.added_D)
        )
        self.move_D = module.weight = nn.Parameter(torch.zeros_like(self.first_D))
        # Unsafe: a move is float32, and the weight in its place need not be.
        register_parametrization(module, "weight", self, unsafe=True)

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

    def __init__(
        self, network: PreTrainedModel, head: Head, batches: Sequence[Rows], folder: Path, seed: int
    ) -> None:
        self.network, self.head, self.batches = network.requires_grad_(False), head, batches
        self.parent = replace(head, weight_VD=head.weight_VD.clone())
        with torch.no_grad():
            self.wanted = [self.hidden(rows) for rows in batches]
        view = DenseView(folder)
        self.coded = take_codes(network, view, seed)
        self.tuned_norms = self._take_dense(view, seed)
        moves = [move for linear in self.coded.values() for move in linear.moves]
        moves += [norm.move_D for norm in self.tuned_norms.values()]
        self.optimizer = torch.optim.Adam(moves, betas=BETAS)

    def _take_dense(self, view: DenseView, seed: int) -> dict[str, TunedNorm]:
        """Every other weight of the quantized folder; the norms by name."""
        _drop_adapter(self.network)  # its update is in the folder's weights
        parameters = dict(self.network.named_parameters())
        norms = read_norms(view, self.coded, seed)
        for name in view.tensors:
            if names.module(name) not in self.coded and name not in norms:
                weight = view.read(name).astype(np.float32)
                parameters[name].data.copy_(torch.from_numpy(weight))
        return {
            name: TunedNorm(self.network.get_submodule(names.module(name)), norm)
            for name, norm in norms.items()
        }

    def hidden(self, rows: Rows) -> Tensor:
        """(N, D) what the head reads."""
        hidden_BTD = hidden_states(self.network, rows.tokens_BT, **rows.extra)
        return hidden_BTD.reshape(-1, hidden_BTD.shape[-1])[rows.real_N]

    @torch.no_grad()
    def divergence(self, batch: int) -> float:
        """As Tuning's."""
        return self.pull(self.hidden(self.batches[batch]), self.wanted[batch])[0]

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

    def update(self, batch: int, learning_rate: float) -> None:
        """As Tuning's."""
        self.optimizer.param_groups[0]["lr"] = learning_rate
        with torch.enable_grad():
            hidden_ND = self.hidden(self.batches[batch])
        pull_ND = self.pull(hidden_ND.detach(), self.wanted[batch])[1]
        hidden_ND.backward(pull_ND / len(pull_ND) * GAIN)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def scales(self) -> Weights:
        """As Tuning's."""
        return stored(self.coded)

    def norms(self) -> Weights:
        """As Tuning's."""
        return {name: norm.stored() for name, norm in self.tuned_norms.items()}

    def undo_norms(self) -> None:
        """As Tuning's."""
        for norm in self.tuned_norms.values():
            norm.move_D.data.zero_()


def _drop_adapter(network: nn.Module) -> None:
    """Put plain linears in the place of those that an adapter has changed."""
    adapted = [(name, m) for name, m in network.named_modules() if isinstance(m, LoraLinear)]
    for name, module in adapted:
        linear = nn.Linear(module.in_features, module.out_features, device="meta")
        linear.weight, linear.bias = module.weight, module.bias
        network.set_submodule(name, linear)
