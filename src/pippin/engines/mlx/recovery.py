"""Scales, zero points and norms on their way to the parent's predictions, in MLX.

Shape letters: N real tokens, C some of them, D hidden, V vocabulary.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from numpy.typing import NDArray

from pippin.engines import Weights
from pippin.engines.mlx.body import Head, plain_head, scalar
from pippin.engines.mlx.coded import move_places, rounded, stored, take_codes
from pippin.engines.mlx.optimizer import Arrays, Optimizer, Sums
from pippin.engines.mlx.probe import run_rows
from pippin.engines.mlx.rows import Rows
from pippin.engines.recovery import BETAS, GAIN, Norm, read_norms
from pippin.errors import ModelError
from pippin.model import names
from pippin.model.config import read_raw
from pippin.model.quantized import DenseView
from pippin.recipe import Train

ADAM = Train(beta1=BETAS[0], beta2=BETAS[1], max_grad_norm=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parent:
    """What is imitated: a head, and the last hidden states (N, D) of every batch."""

    head: Head
    hidden: list[mx.array]


class TunedNorm:
    """A norm's weight as it would be stored, from what it has moved by in shares of its size."""

    def __init__(self, module: Any, norm: Norm) -> None:
        self.module, self.norm, self.used_as = module, norm, module.weight.dtype
        self.first_D, self.added_D = mx.array(norm.first_D), mx.array(norm.added_D)

    def put(self, move_D: mx.array) -> None:
        """Let the network compute with it."""
        self.module.weight = self._tuned(move_D).astype(self.used_as)

    def stored(self, move_D: mx.array) -> NDArray[Any]:
        """What the forward computes with, as the folder has it."""
        return np.array(self._tuned(move_D)).astype(self.norm.dtype)

    def _tuned(self, move_D: mx.array) -> mx.array:
        moved_D = self.first_D + self.norm.size * move_D + self.added_D
        return rounded(moved_D, getattr(mx, self.norm.dtype.name))


class Recovery:
    """The network of a quantized folder, on its way to the parent's predictions."""

    def __init__(
        self, network: nn.Module, folder: Path, parent: Parent, batches: list[Rows], seed: int
    ) -> None:
        """Raises ModelError where mlx-lm names or stores in another way what is to be tuned."""
        self.network, self.parent, self.batches, self.updates = network, parent, batches, 0
        view = DenseView(folder)
        self.coded = take_codes(network, view, seed)
        self.places = move_places(self.coded)
        modules: dict[str, Any] = dict(network.named_modules())
        norms = read_norms(view, self.coded, seed)
        self.tuned_norms = {name: _norm(modules, name, norm) for name, norm in norms.items()}
        first = {name: place.get() for name, place in self.places.items()}
        first |= {name: mx.zeros_like(norm.first_D) for name, norm in self.tuned_norms.items()}
        self.optimizer = Optimizer(first, ADAM)
        self.head = replace(parent.head, module=plain_head(network, read_raw(folder)).module)

    def divergence(self, batch: int) -> float:
        """As Tuning's."""
        self._put(self.optimizer.masters)
        hidden_ND = real_states(self.network, self.batches[batch])
        return scalar(self._pull(hidden_ND, self.parent.hidden[batch])[0])

    def update(self, batch: int, learning_rate: float) -> None:
        """As Tuning's."""
        self.updates += 1
        loss, grads = mx.value_and_grad(self._pulled)(self.optimizer.masters, batch)
        sums = Sums(loss=loss, grads=grads, tokens=1)
        mx.eval(self.optimizer.update(sums, learning_rate, self.updates))

    def _pulled(self, masters: Arrays, batch: int) -> mx.array:
        """A number whose gradient is that of the mean divergence, `GAIN` times."""
        self._put(masters)
        hidden_ND = real_states(self.network, self.batches[batch])
        pull_ND = self._pull(mx.stop_gradient(hidden_ND), self.parent.hidden[batch])[1]
        factor = GAIN / len(hidden_ND)
        return (hidden_ND * mx.stop_gradient(pull_ND * factor)).astype(mx.float32).sum()

    def _pull(self, hidden_ND: mx.array, wanted_ND: mx.array) -> tuple[mx.array, mx.array]:
        """KL in nats over all tokens, and its gradient by the hidden states."""
        total, pulls = mx.array(0.0), list[mx.array]()
        for start in range(0, len(hidden_ND), self.head.chunk):
            some = slice(start, start + self.head.chunk)
            hidden_CD, wanted_CD = hidden_ND[some], wanted_ND[some]
            if pulls:  # one chunk's logits at a time
                hidden_CD = mx.depends([hidden_CD], [pulls[-1]])[0]
            part, pull_CD = mx.value_and_grad(self._divergence)(hidden_CD, wanted_CD)
            total = total + part
            pulls.append(pull_CD)
        return total, mx.concatenate(pulls)

    def _divergence(self, hidden_CD: mx.array, wanted_CD: mx.array) -> mx.array:
        parent_CV, child_CV = (
            logits_CV - mx.logsumexp(logits_CV, axis=-1, keepdims=True)
            for logits_CV in (self.parent.head.logits(wanted_CD), self.head.logits(hidden_CD))
        )
        return (mx.exp(parent_CV) * (parent_CV - child_CV)).sum()

    def _put(self, masters: Arrays) -> None:
        for name, place in self.places.items():
            place.put(masters[name])
        for name, norm in self.tuned_norms.items():
            norm.put(masters[name])

    def scales(self) -> Weights:
        """As Tuning's."""
        self._put(self.optimizer.masters)
        return stored(self.coded)

    def norms(self) -> Weights:
        """As Tuning's."""
        moves = self.optimizer.masters
        return {name: norm.stored(moves[name]) for name, norm in self.tuned_norms.items()}

    def undo_norms(self) -> None:
        """As Tuning's."""
        for name, norm in self.tuned_norms.items():
            self.optimizer.masters[name] = mx.zeros_like(norm.first_D)


def real_states(network: nn.Module, rows: Rows) -> mx.array:
    """(N, D) what the head reads."""
    return run_rows(network, rows).flatten(0, 1)[rows.real_N]


def _norm(modules: dict[str, Any], name: str, norm: Norm) -> TunedNorm:
    module = modules.get(names.module(name))
    if module is not None:
        tuned = TunedNorm(module, norm)
        if mx.array_equal(tuned.first_D.astype(tuned.used_as), module.weight):
            return tuned
    raise ModelError(
        f"mlx-lm loads {name} under another name, or as another tensor, than the checkpoint has",
        'set quantize.recover_tokens = 0, or model.engine = "torch"',
    )
