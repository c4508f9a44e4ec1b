"""Grids by trial: many candidates for every group, the one with the least weighted error is kept.

A candidate clips the group's range a little more than the one before; its codes then give a better
grid by weighted least squares, which is a candidate as well. Round to nearest's own grid is the
first, so that no group is ever worse than that.

Shape letters: O output features, G groups, S weights that share a scale.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pippin.quantizers import Grid
from pippin.quantizers.groups import MIN_SCALE, Grids, nearest, round_to, symmetric_bias
from pippin.quantizers.nested import neighbours, nest
from pippin.quantizers.rtn import plain_grids

# Shares of the group's range that the candidates cover.
SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)
# Weights that are searched at once: their temporaries stay in a processor's cache.
_CHUNK = 1 << 16


def search_grids(
    groups_OGS: NDArray[np.float32],
    grid: Grid,
    dtype: np.dtype[Any],
    weights_GS: NDArray[np.float32],
) -> Grids:
    """Scales and biases that `dtype` holds, least in the weighted squared error of nearest codes.

    `weights_GS`, positive, says what the square of each weight's error counts.
    """
    rows, groups, shared = groups_OGS.shape
    grids = np.empty((rows, groups), np.float32), np.empty((rows, groups), np.float32)
    step = max(1, _CHUNK // (groups * shared))
    for start in range(0, rows, step):
        search = _Search(groups_OGS[start : start + step], weights_GS, grid, dtype)
        for whole, found in zip(grids, search.run(), strict=True):
            whole[start : start + step] = found
    return grids


class _Search:
    """The best grids so far of some rows."""

    def __init__(
        self,
        groups_OGS: NDArray[np.float32],
        weights_GS: NDArray[np.float32],
        grid: Grid,
        dtype: np.dtype[Any],
    ) -> None:
        self.groups_OGS, self.weights_GS = groups_OGS, weights_GS
        self.grid, self.dtype = grid, dtype
        self.weighted_OGS = groups_OGS * weights_GS
        self.best = plain_grids(groups_OGS, grid, dtype)
        self.errors_OG = np.full(self.best[0].shape, np.inf, np.float32)

    def run(self) -> Grids:
        """All candidates."""
        codes_OGS = self.offer(self.best)
        self.offer(self.fit(codes_OGS))
        low_OG, high_OG = self.groups_OGS.min(axis=-1), self.groups_OGS.max(axis=-1)
        for share in SHARES:
            codes_OGS = self.offer(self.clip(low_OG, high_OG, share))
            self.offer(self.fit(codes_OGS))
        if self.grid.nested:
            self.best = nest(self.best, self.grid)
            self.errors_OG[:] = np.inf
            for grids in list(neighbours(self.best, self.grid)):  # `offer` writes into the best
                self.offer(grids)
        return self.best

    def offer(self, grids: Grids) -> NDArray[np.float32]:
        """Keep the grids where they are better than the best so far; the codes they give."""
        codes_OGS = nearest(self.groups_OGS, grids, self.grid.bits)
        away_OGS = codes_OGS * grids[0][..., None]
        away_OGS += grids[1][..., None]
        away_OGS -= self.groups_OGS
        away_OGS *= away_OGS
        errors_OG = _sum(away_OGS, self.weights_GS)
        better_OG = errors_OG < self.errors_OG
        np.copyto(self.errors_OG, errors_OG, where=better_OG)
        for best, offered in zip(self.best, grids, strict=True):
            np.copyto(best, offered, where=better_OG)
        return codes_OGS

    def clip(self, low_OG: Any, high_OG: Any, share: float) -> Grids:
        """Grids over a share of the range, in its middle, or of the largest weight."""
        steps = 2**self.grid.bits - 1
        if self.grid.symmetric:
            return self.stored(share * np.maximum(high_OG, -low_OG) * 2 / steps)
        reach_OG = share * (high_OG - low_OG) / 2
        return self.stored(2 * reach_OG / steps, (low_OG + high_OG) / 2 - reach_OG)

    def fit(self, codes_OGS: NDArray[np.float32]) -> Grids:
        """The grids with the least weighted error for given codes, which are overwritten."""
        weight = self.weights_GS
        if self.grid.symmetric:
            codes_OGS -= 2 ** (self.grid.bits - 1)
            along_OG = np.einsum("ogs,ogs->og", codes_OGS, self.weighted_OGS)
            codes_OGS *= codes_OGS
            return self.stored(along_OG / np.maximum(_sum(codes_OGS, weight), 1e-20))
        all_G, x_OG = weight.sum(-1), self.weighted_OGS.sum(-1)
        q_OG = _sum(codes_OGS, weight)
        qx_OG = np.einsum("ogs,ogs->og", codes_OGS, self.weighted_OGS)
        codes_OGS *= codes_OGS
        qq_OG = _sum(codes_OGS, weight)
        spread_OG = np.maximum(all_G * qq_OG - q_OG * q_OG, 1e-6 * all_G * qq_OG + 1e-20)
        scales_OG = np.maximum((all_G * qx_OG - q_OG * x_OG) / spread_OG, MIN_SCALE)
        return self.stored(scales_OG, (x_OG - scales_OG * q_OG) / all_G)

    def stored(self, scales_OG: Any, biases_OG: Any = None) -> Grids:
        """Rounded to what is stored; a scale is positive."""
        scales_OG = round_to(np.maximum(scales_OG, MIN_SCALE), self.dtype)
        if biases_OG is None:
            return scales_OG, symmetric_bias(scales_OG, self.grid.bits)
        return scales_OG, round_to(biases_OG, self.dtype)


def _sum(values_OGS: NDArray[np.float32], weights_GS: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.einsum("ogs,gs->og", values_OGS, weights_GS)
