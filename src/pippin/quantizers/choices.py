"""What becomes of every tensor when a model is quantized, and how the folder's config says it."""

import fnmatch
from dataclasses import dataclass
from typing import Any

import numpy as np

from pippin.errors import ModelError
from pippin.model import names
from pippin.model.config import ModelConfig, with_rope_keys
from pippin.model.quantized import GRIDS_KEY
from pippin.model.weights import Shaped, Spec, Tensors
from pippin.quantizers import Grid
from pippin.quantizers.nested import GROUP, INSTEAD, SUPER, nested_grid
from pippin.recipe import Quantize, Scheme

_GROUPS = (128, 64, 32)
_FLOATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What becomes of one tensor. `why` says why a matrix stays dense or has another group size."""

    grid: Grid | None
    why: str = ""


def choose_all(checkpoint: Tensors, config: ModelConfig, settings: Quantize) -> dict[str, Choice]:
    """What becomes of every tensor, by name; a tied head's copy is left out.

    Raises ModelError where a pattern of `keep` matches nothing.
    """
    for pattern in settings.keep:
        if not any(_kept_by(pattern, name) for name in checkpoint.tensors):
            raise ModelError(
                f"quantize.keep: {pattern!r} matches no tensor",
                f"names look like {next(iter(checkpoint.tensors))}",
            )
    return {
        name: _choose(name, info, config, settings)
        for name, info in checkpoint.tensors.items()
        if not (config.tied_embeddings and names.is_head(names.module(name)))
    }


def _choose(name: str, info: Shaped, config: ModelConfig, settings: Quantize) -> Choice:
    module = names.module(name)
    if len(info.shape) < 2:
        return Choice(grid=None)
    if any(_kept_by(pattern, name) for pattern in settings.keep):
        return Choice(grid=None, why="kept by the recipe")
    if info.dtype.name not in _FLOATS:
        return Choice(grid=None, why=f"{info.dtype.name} is no dtype of weights")
    if names.is_transposed(config.model_type, module):
        return Choice(grid=None, why="stored as (inputs, outputs), groups run over inputs")
    if len(info.shape) == 2 and (names.is_embedding(module) or names.is_head(module)):
        if settings.embed_bits == 16:
            return Choice(grid=None, why="embed_bits = 16")
        return _fit(
            info.shape, settings.embed_bits, settings.embed_group_size, settings.embed_scheme
        )
    if names.is_linear(name, info.shape):
        return _fit(info.shape, settings.bits, settings.group_size, settings.scheme)
    return Choice(grid=None, why="no linear of a decoder layer")


def _fit(shape: tuple[int, ...], bits: int, group_size: int, scheme: Scheme) -> Choice:
    """The asked group size, or the nearest smaller one that divides the width."""
    width = shape[1]
    sizes = [g for g in _GROUPS if g <= (group_size or max(_GROUPS)) and width % g == 0]
    if not sizes:
        return Choice(grid=None, why=f"width {width} is not a multiple of 32")
    size = sizes[0]
    other = group_size not in (0, size)
    why = f"groups of {size}: {group_size} does not divide {width}" if other else ""
    if scheme == "k":
        return _nested(width, bits)
    symmetric = scheme == "symmetric"
    grid = Grid(bits=bits, group_size=size, symmetric=symmetric, per_channel=group_size == 0)
    return Choice(grid=grid, why=why)


def _nested(width: int, bits: int) -> Choice:
    """Scales of scales; plain ones of a bit or two more, as llama.cpp has it, for other widths."""
    if width % SUPER == 0:
        return Choice(grid=nested_grid(bits))
    instead = INSTEAD[bits]
    why = f"{SUPER} does not divide {width}: codes of {instead.bits} bits in groups of {GROUP}"
    return Choice(grid=instead, why=why)


def _kept_by(pattern: str, name: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(names.module(name), pattern)


def layout_specs(checkpoint: Tensors, choices: dict[str, Choice]) -> dict[str, Shaped]:
    """Every tensor of the quantized folder."""
    specs: dict[str, Shaped] = {}
    for name, choice in choices.items():
        info, grid, module = checkpoint.tensors[name], choice.grid, names.module(name)
        if grid is None:
            specs[name] = info
            continue
        outputs, inputs = info.shape
        packed = (outputs, inputs * grid.bits // 32)
        groups = Spec(shape=(outputs, inputs // grid.group_size), dtype=info.dtype)
        specs[name] = Spec(shape=packed, dtype=np.dtype(np.uint32))
        specs[f"{module}.scales"] = specs[f"{module}.biases"] = groups
    return specs


def quantized_config(
    config: ModelConfig, choices: dict[str, Choice], settings: Quantize
) -> dict[str, Any]:
    """config.json as mlx-lm reads it: a default, and an entry for every module that differs.

    No `quantization_config`: transformers would take it for a method of its own.
    """
    default = _default(choices, settings)
    sizes: dict[str, Any] = {"group_size": default.group_size, "bits": default.bits}
    grids: dict[str, Any] = {"default": _special(default)}
    for name, choice in choices.items():
        grid, module = choice.grid, names.module(name)
        if grid is None and choice.why and name.endswith(".weight"):
            sizes[module] = False
        elif grid and (grid.bits, grid.group_size) != (default.bits, default.group_size):
            sizes[module] = {"group_size": grid.group_size, "bits": grid.bits}
        if grid and _special(grid) != _special(default):
            grids[module] = _special(grid)
    quantization = {**sizes, "mode": "affine"}
    return {**with_rope_keys(config.raw), "quantization": quantization, GRIDS_KEY: grids}


def _default(choices: dict[str, Choice], settings: Quantize) -> Grid:
    """The grid that most linears have."""
    linears = [c.grid for n, c in choices.items() if c.grid and names.layer(n) is not None]
    if linears:
        return max(set(linears), key=linears.count)
    asked = _fit((1, SUPER), settings.bits, settings.group_size, settings.scheme).grid
    assert asked is not None
    return asked


def _special(grid: Grid) -> dict[str, bool]:
    nested = {"nested": True} if grid.nested else {}
    return {"symmetric": grid.symmetric, "per_channel": grid.per_channel, **nested}
