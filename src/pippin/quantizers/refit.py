"""The best scales and zero points for given codes, in closed form.

A row of the quantized weight is linear in its scales and zero points, so the ones with the least
E H E^T solve G (symmetric) or 2 G (affine) linear equations.

Shape letters: R rows, I input features, G groups, U unknowns of a row.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pippin.quantizers import Grid
from pippin.quantizers.groups import Grids, round_to, symmetric_bias
from pippin.quantizers.hessian import Hessian
from pippin.quantizers.nested import nest

Floats = NDArray[np.float32]
# Rows that are solved at once: the work holds rows x inputs floats a few times over.
_ROWS = 256
# Draws the solution to the old grids where the codes leave it open.
_RIDGE = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What scales and biases are held to: the grid's form, the stored dtype, the inputs' weight."""

    grid: Grid
    dtype: np.dtype[Any]
    hessian: Hessian


def refit(weight_RI: Floats, codes_RI: Floats, grids: Grids, terms: Terms) -> Grids:
    """The grids with the least error for given codes, rounded to the stored dtype.

    A row keeps its grids where that rounding undoes the gain; a group keeps its scale where the
    best one is not positive.
    """
    parts = []
    for start in range(0, len(weight_RI), _ROWS):
        rows = slice(start, start + _ROWS)
        system = _System(weight_RI[rows], codes_RI[rows], terms)
        parts.append(system.solve((grids[0][rows], grids[1][rows])))
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])


class _System:
    """K t = r for every row; t are the scales, then (affine) the values of the middle code."""

    def __init__(self, weight_RI: Floats, codes_RI: Floats, terms: Terms) -> None:
        grid, self.dtype = terms.grid, terms.dtype
        self.grid, self.half = grid, 2 ** (grid.bits - 1)
        self.codes_RI = codes_RI - self.half
        self.matrix_II = terms.hessian.matrix_II
        rows, inputs = codes_RI.shape
        self.size = inputs if grid.per_channel else grid.group_size
        self.split = (rows, inputs // self.size, self.size)
        pull_RI = weight_RI @ self.matrix_II
        self.wanted_RU = self.sums(pull_RI * self.codes_RI)
        self.normal_RUU, mixed_RGG = self.products()
        if not grid.symmetric:
            self.wanted_RU = np.concatenate([self.wanted_RU, self.sums(pull_RI)], axis=1)
            self.normal_RUU = self.with_zero_points(mixed_RGG)

    def sums(self, values_RI: NDArray[Any]) -> NDArray[np.float64]:
        """Over every group."""
        return values_RI.reshape(self.split).sum(axis=-1).astype(np.float64)

    def products(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """c H c and c H 1 between all pairs of groups, c the codes."""
        rows, groups, size = self.split
        both = np.empty((rows, groups, groups)), np.empty((rows, groups, groups))
        for group in range(groups):
            inputs = slice(group * size, (group + 1) * size)
            reach_RI = self.codes_RI[:, inputs] @ self.matrix_II[inputs]
            if not self.grid.symmetric:
                both[1][:, group] = self.sums(reach_RI)
            reach_RI *= self.codes_RI
            both[0][:, group] = self.sums(reach_RI)
        return both

    def with_zero_points(self, mixed_RGG: NDArray[np.float64]) -> NDArray[np.float64]:
        """The whole matrix [[c H c, c H 1], [1 H c, 1 H 1]]."""
        rows, groups, size = self.split
        ones_GG = self.matrix_II.reshape(groups, size, groups, size).sum(axis=(1, 3))
        ones_RGG = np.broadcast_to(ones_GG, (rows, groups, groups))
        left = np.concatenate([self.normal_RUU, mixed_RGG.swapaxes(1, 2)], axis=1)
        return np.concatenate([left, np.concatenate([mixed_RGG, ones_RGG], axis=1)], axis=2)

    def solve(self, old: Grids) -> Grids:
        """The rounded solution, or the old grids where they are better."""
        old_RU = self.unknowns(old)
        unknowns = self.normal_RUU.shape[1]
        mean_R = np.trace(self.normal_RUU, axis1=1, axis2=2) / unknowns
        ridge_R = _RIDGE * mean_R + np.finfo(np.float32).tiny
        normal_RUU = self.normal_RUU + ridge_R[:, None, None] * np.eye(unknowns)
        wanted_RU = self.wanted_RU + ridge_R[:, None] * old_RU
        found_RU = np.linalg.solve(normal_RUU, wanted_RU[..., None])[..., 0]
        new = self.stored(found_RU, old)
        with np.errstate(invalid="ignore"):  # a grid beyond the stored dtype is never better
            better_R1 = (self.error(self.unknowns(new)) < self.error(old_RU))[:, None]
        return np.where(better_R1, new[0], old[0]), np.where(better_R1, new[1], old[1])

    def unknowns(self, grids: Grids) -> NDArray[np.float64]:
        """Scales, then the values of the middle code."""
        scales_RG, biases_RG = (part.astype(np.float64) for part in grids)
        if self.grid.symmetric:
            return scales_RG
        return np.concatenate([scales_RG, biases_RG + self.half * scales_RG], axis=1)

    def stored(self, found_RU: NDArray[np.float64], old: Grids) -> Grids:
        """Rounded, and with positive scales."""
        groups = old[0].shape[1]
        scales_RG = round_to(found_RU[:, :groups], self.dtype)
        open_RG = ~((scales_RG > 0) & np.isfinite(scales_RG))
        scales_RG[open_RG] = old[0][open_RG]
        if self.grid.symmetric:
            symmetric = scales_RG, symmetric_bias(scales_RG, self.grid.bits)
            return nest(symmetric, self.grid)
        biases_RG = round_to(found_RU[:, groups:] - self.half * scales_RG, self.dtype)
        return nest((scales_RG, biases_RG), self.grid)

    def error(self, grids_RU: NDArray[np.float64]) -> NDArray[np.float64]:
        """E H E^T of every row, but for a constant."""
        moved_RU = np.einsum("ruv,rv->ru", self.normal_RUU, grids_RU)
        return ((moved_RU - 2 * self.wanted_RU) * grids_RU).sum(axis=1)
