"""Proves a .pte against the same quantized program in eager torch, beside the gate of all targets.

Activations are rounded to int8 in front of every linear, so a difference in a sum's last bit can
move a code by a step, and each step moves others: in a deep model two runs that differ in nothing
but the order of a sum end apart by as much as the rounding itself. How far is measured beside the
file, by nudging the eager program; the file may not differ by more than that.

Shape letters: B batch (1), T tokens, V vocab, D hidden.
"""

from collections.abc import Iterator, Sequence
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
NUDGE = 1e-5
# Allowed over the nudged program: factor and offset of the KL, share of top-1 tokens.
KL_FACTOR, KL_OFFSET, TOP1_SLACK = 2.0, 1e-3, 0.05
# Tokens whose logits are held at a time.
_TOGETHER = 64


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
class _Part:
    """Some tokens of a row, each with its figures."""

    kl_T: Tensor
    nudged_kl_T: Tensor
    equal_T: Tensor
    nudged_equal_T: Tensor
    median_T: Tensor
    most_T: Tensor


class CheckedModel(PteModel):
    """A .pte that is compared with eager torch on every row whose logits are asked for."""

    def __init__(self, path: Path, weights: Weights) -> None:
        super().__init__(path, weights.shape.context)
        self._weights = weights
        self._parts: list[_Part] = []
        self._prefill_kls: list[float] = []

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits after every token of one row, (T, V), a step each."""
        found_TV = super().logits(tokens)
        last_V, at_once_V = map(torch.from_numpy, (found_TV[-1], self.last_logits(tokens, 0)))
        self._prefill_kls.append(float(_kl(last_V.log_softmax(-1), at_once_V.log_softmax(-1))))
        eager = eager_logits(self._weights, tokens)
        for (expected_TV, nudged_TV), part_TV in zip(
            eager, torch.from_numpy(found_TV).split(_TOGETHER), strict=True
        ):
            self._parts.append(_compare(expected_TV, nudged_TV, part_TV))
        return found_TV

    def figures(self) -> Figures:
        """The file beside eager torch; PippinError where they differ by more than rounding."""
        figures = _figures(self._parts, self._prefill_kls)
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


def eager_logits(weights: Weights, tokens: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits after every token, (T, V) float32, of the exported program and of a nudged run.

    They come _TOGETHER tokens at a time.
    """
    plain_TD, nudged_TD = _hidden(weights, tokens)
    for parts in zip(plain_TD.split(_TOGETHER), nudged_TD.split(_TOGETHER), strict=True):
        plain_TV, nudged_TV = map(weights.exit, parts)
        yield plain_TV, nudged_TV


def _hidden(weights: Weights, tokens: Sequence[int]) -> tuple[Tensor, ...]:
    """What comes out of the last layer, (T, D), in both runs.

    They go through a layer at once, which expands its weights once; a row begins at 0, so all
    layers and runs can share one cache.
    """
    length, cache = len(tokens), weights.parts.cache(weights.shape)
    with torch.no_grad(), without_harmless_lines():
        ids_BT = torch.tensor([[int(token) for token in tokens]])
        x_BTD, where = weights.entry(ids_BT, torch.tensor([0]))
        x_BTD = torch.cat([x_BTD, _nudged(x_BTD)], 1)
        for layer, (rope, place) in zip(weights.layers, where, strict=True):
            heads = layer.before(x_BTD, tuple(part.repeat(1, 2, 1, 1) for part in rope))
            of_runs = zip(*(part.split(length, 1) for part in heads), strict=True)
            mixed_BTHC = torch.cat([cache(*qkv, place) for qkv in of_runs], 1)
            x_BTD = layer.after(x_BTD, mixed_BTHC)
    return x_BTD[0].split(length)


def _nudged(x_BTD: Tensor) -> Tensor:
    random = torch.Generator().manual_seed(0)
    return x_BTD * (1 + NUDGE * torch.randn(x_BTD.shape, generator=random))


def _compare(expected_TV: Tensor, nudged_TV: Tensor, found_TV: Tensor) -> _Part:
    difference_TV = (found_TV - expected_TV).abs()
    p_TV, nudged_TV, q_TV = (x.log_softmax(-1) for x in (expected_TV, nudged_TV, found_TV))
    best_T = p_TV.argmax(-1)
    return _Part(
        kl_T=_kl(p_TV, q_TV),
        nudged_kl_T=_kl(p_TV, nudged_TV),
        equal_T=q_TV.argmax(-1) == best_T,
        nudged_equal_T=nudged_TV.argmax(-1) == best_T,
        median_T=difference_TV.median(-1).values,
        most_T=difference_TV.amax(-1),
    )


def _figures(parts: list[_Part], prefill_kls: list[float]) -> Figures:
    def joined(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts]).float()

    return Figures(
        rows=len(prefill_kls),
        tokens=len(joined("kl_T")),
        mean_kl=float(joined("kl_T").mean()),
        nudged_kl=float(joined("nudged_kl_T").mean()),
        top1=float(joined("equal_T").mean()),
        nudged_top1=float(joined("nudged_equal_T").mean()),
        prefill_kl=sum(prefill_kls) / len(prefill_kls),
        max_difference=float(joined("most_T").max()),
        median_difference=float(joined("median_T").median()),
    )


def _kl(p_TV: Tensor, q_TV: Tensor) -> Tensor:
    """KL of two distributions in logarithms, by the last axis."""
    return (p_TV.exp() * (p_TV - q_TV)).sum(-1)
