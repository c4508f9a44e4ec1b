"""Codes whose scales and zero points are trained: what every engine computes, and stores, of them.

A scale or bias is trained in float32 and rounded to the stored dtype before it is used; gradients
pass the rounding as if it were not there. The codes stay as the quantizer chose them.

Shape letters: O outputs, I inputs, G groups.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pippin.engines import Weights
from pippin.errors import ModelError
from pippin.model import names
from pippin.model.quantized import DenseView
from pippin.quantizers import Codes, Grid
from pippin.quantizers.groups import MIN_SCALE, Grids

# (values, the least of them or None) -> the nearest values that the stored dtype holds, float32.
Rounded: TypeAlias = Callable[[Any, float | None], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scales:
    """A linear's scales and biases (O, G) before the first update; per channel G is 1.

    What they move by counts in scales, from 0; a move shifts the middle of a grid, not its lower
    end. Where a value rounds over to the next is fixed by `added`, elsewhere for each: a move
    smaller than the step between two stored values takes its share of all values one step on.
    """

    grid: Grid
    first: Grids
    added: Grids
    dtype: np.dtype[Any]
    repeats: int

    @property
    def parts(self) -> range:
        """Numbers of the arrays of moves: of scales, and of biases that do not follow from them."""
        return range(1 if self.grid.symmetric else 2)

    def stored(self, tuned: Sequence[NDArray[np.float32]]) -> list[NDArray[Any]]:
        """Scales and biases as the layout has them: a row's own stand in every group."""
        return [np.repeat(part.astype(self.dtype), self.repeats, axis=1) for part in tuned]


def read_coded(
    view: DenseView, modules: Container[str], seed: int, library: str
) -> Iterator[tuple[str, NDArray[np.uint8], Scales]]:
    """Every quantized linear of the layers: its module's name, codes (O, I) and scales.

    Raises ModelError where the `library`'s network has no such module.
    """
    rng = np.random.default_rng(seed)
    for name in (name for name in view.grids if names.layer(name) is not None):
        module = names.module(name)
        if module not in modules:
            raise ModelError(
                f"{library} loads {name} under another name than the checkpoint",
                "set quantize.recover_tokens = 0 and qat.steps = 0",
            )
        codes = view.read_codes(name)
        yield module, codes.codes_OI, _scales(codes, view.grids[name], rng)


def tuned(
    bits: int, first: Sequence[Any], added: Sequence[Any], moves: Sequence[Any], rounded: Rounded
) -> tuple[Any, Any]:
    """Scales, which stay positive, and biases as they would be stored, in an engine's arrays.

    Without moves of their own biases follow from the scales: the grid is symmetric.
    """
    (scale, bias), zero = first, 2 ** (bits - 1)
    moved = rounded(scale + scale * moves[0] + added[0], MIN_SCALE)
    if len(moves) == 1:
        return moved, -zero * moved
    bias = bias + scale * (moves[1] - zero * moves[0])
    return moved, rounded(bias + added[1], None)


def by_tensor(stored: Mapping[str, Sequence[NDArray[Any]]]) -> Weights:
    """Scales and biases under the names that their tensors have in a folder."""
    scales = {f"{name}.scales": parts[0] for name, parts in stored.items()}
    return scales | {f"{name}.biases": parts[1] for name, parts in stored.items()}


def refuse_dense(coded: Container[str], folder: Path) -> None:
    """Raise ModelError where there is nothing to train."""
    if not coded:
        raise ModelError(
            f"{folder} has no quantized linear in its layers",
            "set qat.steps = 0, keep fewer tensors by quantize.keep, or ask for less size",
        )


def dither(stored: NDArray[Any], rng: np.random.Generator) -> NDArray[np.float32]:
    """What is added to values before they are rounded: less than takes a stored one to another."""
    toward_zero = np.nextafter(stored, np.zeros_like(stored)).astype(np.float32)
    step = np.abs(stored.astype(np.float32) - toward_zero)
    return step * rng.uniform(-0.49, 0.49, step.shape).astype(np.float32)


def _scales(codes: Codes, grid: Grid, rng: np.random.Generator) -> Scales:
    repeats = codes.scales_OG.shape[1] if grid.per_channel else 1
    scale_OG, bias_OG = (part[:, ::repeats] for part in (codes.scales_OG, codes.biases_OG))
    return Scales(
        grid=grid,
        first=(scale_OG.astype(np.float32), bias_OG.astype(np.float32)),
        added=(dither(scale_OG, rng), dither(bias_OG, rng)),
        dtype=codes.scales_OG.dtype,
        repeats=repeats,
    )
