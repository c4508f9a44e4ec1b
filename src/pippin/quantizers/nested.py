"""Scales of scales, as GGUF's K types have them: those of some groups are multiples of one step.

A super-group is 256 weights, eight groups of 32. Its step is a power of two, the multiples have 4
to 7 bits, so that a scale is exact in bfloat16 and a folder holds what the file will. Zero points
have a step and multiples of their own and are never positive.

Shape letters: O output features, G groups, U super-groups.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pippin.quantizers import Grid
from pippin.quantizers.groups import Grids, symmetric_bias

GROUP, SUPER = 32, 256
# bits of the codes -> the largest multiple that the K type of so many bits has
MOST = {2: 15, 3: 31, 4: 63, 5: 63, 6: 127}
# The widths whose K type has no zero points.
SYMMETRIC = (3, 6)
# What llama.cpp stores where 256 does not divide a row: Q4_0, Q4_0, Q5_0, Q5_1 and Q8_0.
INSTEAD = {
    2: Grid(bits=4, group_size=GROUP, symmetric=True),
    3: Grid(bits=4, group_size=GROUP, symmetric=True),
    4: Grid(bits=5, group_size=GROUP, symmetric=True),
    5: Grid(bits=5, group_size=GROUP, symmetric=False),
    6: Grid(bits=8, group_size=GROUP, symmetric=True),
}
# The least step is float16's least value, and a float32 has no larger exponent than its own.
_LEAST, _LARGEST = -24, 127


def nested_grid(bits: int) -> Grid:
    """The grid of the K type of so many bits."""
    return Grid(bits=bits, group_size=GROUP, symmetric=bits in SYMMETRIC, nested=True)


def nest(grids: Grids, grid: Grid) -> Grids:
    """The nearest grids with scales of scales where the grid asks for them, else as they are."""
    if not grid.nested:
        return grids
    (scales_OG, biases_OG), most = grids, MOST[grid.bits]
    if grid.symmetric:
        scales_OG = _multiples(scales_OG, most, least=1)
        return scales_OG, symmetric_bias(scales_OG, grid.bits)
    # A group above zero is covered from zero on.
    above_OG = np.maximum(biases_OG, 0) / np.float32(2**grid.bits - 1)
    scales_OG = _multiples(scales_OG + above_OG, most, least=1)
    return scales_OG, -_multiples(np.maximum(-biases_OG, 0), most, least=0)


def neighbours(grids: Grids, grid: Grid) -> Iterator[Grids]:
    """Nested grids as they are and with multiples that are one less or more: all within the type.

    What rounding did to a scale its zero point can make up for, so the nearest are not the best.
    """
    (scales_OG, biases_OG), most = grids, MOST[grid.bits]
    scale_steps_OG, bias_steps_OG = (
        steps(np.abs(part_OG), most).repeat(SUPER // GROUP, axis=1) for part_OG in grids
    )
    for along in (0, -1, 1):
        moved_OG = scales_OG + along * scale_steps_OG
        moved_OG = np.clip(moved_OG, scale_steps_OG, most * scale_steps_OG)
        if grid.symmetric:
            yield moved_OG, symmetric_bias(moved_OG, grid.bits)
            continue
        for down in (0, -1, 1):
            shifted_OG = biases_OG + down * bias_steps_OG
            yield moved_OG, np.clip(shifted_OG, -most * bias_steps_OG, 0)


def steps(values_OG: NDArray[np.float32], most: int) -> NDArray[np.float32]:
    """(O, U) The least power of two of which `most` reach the largest value of a super-group."""
    rows, groups = values_OG.shape
    largest_OU = values_OG.reshape(rows, groups * GROUP // SUPER, -1).max(-1)
    fraction_OU, power_OU = np.frexp(largest_OU / np.float32(most))
    power_OU = np.where(fraction_OU == 0.5, power_OU - 1, power_OU)
    return np.ldexp(np.float32(1), np.clip(power_OU, _LEAST, _LARGEST))


def _multiples(values_OG: NDArray[np.float32], most: int, least: int) -> NDArray[np.float32]:
    steps_OG = steps(values_OG, most).repeat(SUPER // GROUP, axis=1)
    return np.clip(np.rint(values_OG / steps_OG), least, most) * steps_OG
