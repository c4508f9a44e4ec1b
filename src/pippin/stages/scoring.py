"""Runs held-out rows through a model and measures it against what its parent predicted.

Shape letters: B rows of a batch, T tokens, S held-out rows, N scored positions of all rows, n those
of one row, K kept tokens, Q asked ones (the parent's, then the true next token), X both.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pippin.data.batches import Sample
from pippin.engines import Scorer, Tokens
from pippin.stages.distribution import Distribution, divergence, row_digest


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """One model over the held-out rows; `kl` and `top1` where there was a parent."""

    distribution: Distribution
    kl: float | None = None
    top1: float | None = None


def groups(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Indices in groups of at most `size`, similar lengths together, the longest first."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    return [order[start : start + size] for start in range(0, len(order), size)]


class Sheet:
    """Arrays over all scored positions, filled batch by batch in any order."""

    def __init__(self, samples: Sequence[Sample], parent: Distribution | None, k: int) -> None:
        """`parent` is about the same samples; `k` tokens of the own distribution are kept."""
        self.samples, self.parent = samples, parent
        self.counts_S = np.array([sample.scored.sum() for sample in samples], np.int32)
        self.starts_S = np.concatenate([[0], np.cumsum(self.counts_S)])
        positions = int(self.starts_S[-1])
        self.ids_NK = np.zeros((positions, k), np.int32)
        self.logprobs_NK = np.zeros((positions, k), np.float32)
        self.losses_S = np.zeros(len(samples), np.float64)
        self.kl_N = np.zeros(positions, np.float64)

    def fill(self, scorer: Scorer, group: list[int]) -> None:
        """Score the rows of a group together."""
        tokens_BT = padded([self.samples[row].tokens for row in group])
        k = self.ids_NK.shape[1]
        found = scorer.topk(tokens_BT, k, self._asked(tokens_BT, group))
        for b, row in enumerate(group):
            before_n, part = self._before(row), self._part(row)
            logprobs_nX = found.logprobs_BTK[b, before_n]
            self.ids_NK[part] = found.ids_BTK[b, before_n, :k]
            self.logprobs_NK[part] = logprobs_nX[:, :k]
            self._compare(row, logprobs_nX[:, k:])

    def _compare(self, row: int, logprobs_nQ: NDArray[np.float32]) -> None:
        self.losses_S[row] = -logprobs_nQ[:, -1].astype(np.float64).sum()
        if self.parent is not None:
            part = self._part(row)
            self.kl_N[part] = divergence(self.parent.logprobs_NK[part], logprobs_nQ[:, :-1])

    def _asked(self, tokens_BT: Tokens, group: list[int]) -> NDArray[np.int32]:
        kept = 0 if self.parent is None else self.parent.ids_NK.shape[1]
        asked_BTQ = np.zeros((*tokens_BT.shape, kept + 1), np.int32)
        asked_BTQ[:, :-1, -1] = tokens_BT[:, 1:]
        if self.parent is not None:
            for b, row in enumerate(group):
                asked_BTQ[b, self._before(row), :-1] = self.parent.ids_NK[self._part(row)]
        return asked_BTQ

    def _before(self, row: int) -> NDArray[np.intp]:
        # The distribution at a position is about the token after it.
        return np.flatnonzero(self.samples[row].scored) - 1

    def _part(self, row: int) -> slice:
        return slice(int(self.starts_S[row]), int(self.starts_S[row + 1]))

    def scored(self) -> Scored:
        """The result, when every row is filled."""
        distribution = Distribution(
            ids_NK=self.ids_NK,
            logprobs_NK=self.logprobs_NK,
            losses_S=self.losses_S,
            counts_S=self.counts_S,
            digests_S=np.array([row_digest(sample) for sample in self.samples], np.uint64),
        )
        if self.parent is None:
            return Scored(distribution=distribution)
        agrees_N = self.ids_NK[:, 0] == self.parent.ids_NK[:, 0]
        # The mean of true divergences cannot be negative; rounding can make it so.
        kl = max(0.0, float(self.kl_N.mean()))
        return Scored(distribution=distribution, kl=kl, top1=float(agrees_N.mean()))


def padded(rows: Sequence[Tokens]) -> Tokens:
    """Rows (T,) int32 as one array (B, T), zeros on the right."""
    tokens_BT = np.zeros((len(rows), max(len(row) for row in rows)), np.int32)
    for b, row in enumerate(rows):
        tokens_BT[b, : len(row)] = row
    return tokens_BT
