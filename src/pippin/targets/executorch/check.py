"""Proves a .pte against the same quantized program in eager torch, beside the gate of all targets.

Activations are rounded to int8 in front of every linear, so a difference in a sum's last bit can
move a code by a step, and each step moves others: in a deep model two runs that differ in nothing
but the order of a sum end apart by as much as the rounding itself. How far is measured beside the
file, by nudging the eager program; the file may not differ by more than that.

Shape letters: B batch (1), T tokens, V vocab, D hidden, N runs: the program and its nudged ones.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pippin.errors import PippinError
from pippin.targets.decoder import Weights
from pippin.targets.executorch.runtime import PteModel
from pippin.targets.native_log import without_harmless_lines

# Relative size of the nudge: above float32's own rounding, far below a step of int8.
NUDGE, NUDGES = 1e-5, 2
# Allowed over the nudged program: factor and offset of the KL, share of top-1 tokens.
KL_FACTOR, KL_OFFSET, TOP1_SLACK = 2.0, 1e-3, 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Means over all tokens of all rows; KL in nats a token, differences of logits.

    `nudged_*` compare the eager program with itself after a nudge. `prefill_kl` compares a row
    taken at once with the same row token by token, both in the file. `median_difference` is the
    median over tokens of the median over the vocabulary.
    """

    rows: int
    tokens: int
    mean_kl: float
    nudged_kl: float
    top1: float
    nudged_top1: float
    prefill_kl: float
    max_difference: float
    median_difference: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """One row's figures a token, and where it was taken at once."""

    kl_T: Tensor
    nudged_kl_T: Tensor
    equal_T: Tensor
    nudged_equal_T: Tensor
    difference_T: Tensor
    max_difference: float
    prefill_kl: float


class CheckedModel(PteModel):
    """A .pte that is compared with eager torch on every row whose logits are asked for."""

    def __init__(self, path: Path, weights: Weights) -> None:
        super().__init__(path, weights.shape.context)
        self._weights = weights
        self._rows: list[_Row] = []

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits after every token of one row, (T, V), a step each."""
        found_TV, prefill_V = super().logits(tokens), self.last_logits(tokens, 0)
        eager_NTV = eager_logits(self._weights, tokens, NUDGES)
        self._rows.append(_compare(eager_NTV, *map(torch.from_numpy, (found_TV, prefill_V))))
        return found_TV

    def figures(self) -> Figures:
        """The file beside eager torch; PippinError where they differ by more than rounding."""
        figures = _figures(self._rows)
        kl_limit = KL_FACTOR * figures.nudged_kl + KL_OFFSET
        top1_limit = figures.nudged_top1 - TOP1_SLACK
        # Written so that a figure that is not a number fails.
        kept = figures.mean_kl <= kl_limit and figures.top1 >= top1_limit
        if not (kept and figures.prefill_kl <= 2 * kl_limit):
            measured = ", ".join(f"{name} {value:.4g}" for name, value in asdict(figures).items())
            raise PippinError(
                f"executorch: the .pte does not compute what its program does: {measured}",
                f"mean_kl may be {kl_limit:.4g}, prefill_kl twice that, top1 no less than "
                f"{top1_limit:.4g}; use the versions of executorch and torch that pippin names",
            )
        return figures


def eager_logits(weights: Weights, tokens: Sequence[int], nudges: int = 0) -> Tensor:
    """Logits after every token, (N, T, V) float32: the exported program's, then nudged ones'.

    The runs go through a layer together, which expands its weights once. A row begins at 0, so all
    layers and runs share one cache.
    """
    length, runs, shape = len(tokens), 1 + nudges, weights.shape
    with torch.no_grad(), without_harmless_lines():
        ids_BT = torch.tensor([[int(token) for token in tokens]])
        x_BTD, where = weights.entry(ids_BT, torch.tensor([0]))
        x_BTD = torch.cat([x_BTD, *(_nudged(x_BTD, seed) for seed in range(nudges))], 1)
        cache = weights.parts.cache(shape)
        for layer, (rope, place) in zip(weights.layers, where, strict=True):
            heads = layer.before(x_BTD, tuple(part.repeat(1, runs, 1, 1) for part in rope))
            of_runs = zip(*(part.split(length, 1) for part in heads), strict=True)
            mixed_BTHC = torch.cat([cache(*qkv, place) for qkv in of_runs], 1)
            x_BTD = layer.after(x_BTD, mixed_BTHC)
        return weights.exit(x_BTD).view(runs, length, -1)


def _nudged(x_BTD: Tensor, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return x_BTD * (1 + NUDGE * torch.randn(x_BTD.shape, generator=random))


def _compare(eager_NTV: Tensor, found_TV: Tensor, prefill_V: Tensor) -> _Row:
    expected_TV, *nudged = eager_NTV.log_softmax(-1)
    said_TV, best_T = found_TV.log_softmax(-1), expected_TV.argmax(-1)
    difference_TV = (found_TV - eager_NTV[0]).abs()
    return _Row(
        kl_T=_kl(expected_TV, said_TV),
        nudged_kl_T=torch.stack([_kl(expected_TV, other_TV) for other_TV in nudged]).mean(0),
        equal_T=(said_TV.argmax(-1) == best_T).float(),
        nudged_equal_T=torch.stack([n_TV.argmax(-1) == best_T for n_TV in nudged]).float().mean(0),
        difference_T=difference_TV.median(-1).values,
        max_difference=float(difference_TV.max()),
        prefill_kl=float(_kl(said_TV[-1], prefill_V.log_softmax(-1))),
    )


def _figures(rows: list[_Row]) -> Figures:
    kl_T = torch.cat([row.kl_T for row in rows])
    return Figures(
        rows=len(rows),
        tokens=len(kl_T),
        mean_kl=float(kl_T.mean()),
        nudged_kl=float(torch.cat([row.nudged_kl_T for row in rows]).mean()),
        top1=float(torch.cat([row.equal_T for row in rows]).mean()),
        nudged_top1=float(torch.cat([row.nudged_equal_T for row in rows]).mean()),
        prefill_kl=sum(row.prefill_kl for row in rows) / len(rows),
        max_difference=max(row.max_difference for row in rows),
        median_difference=float(torch.cat([row.difference_T for row in rows]).median()),
    )


def _kl(p_TV: Tensor, q_TV: Tensor) -> Tensor:
    """KL of two distributions in logarithms, by the last axis."""
    return (p_TV.exp() * (p_TV - q_TV)).sum(-1)
