"""Bits under a budget: what every linear costs on each grid is measured, then bits are shared out.

Shape letters: O output features, I input features, R the rows that are tried.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pippin.errors import ModelError
from pippin.model import names
from pippin.model.quantized import BITS, dequantize
from pippin.quantizers import Grid, load_quantizer
from pippin.quantizers.budget import Offer, Shared, share_out, stored_bits
from pippin.quantizers.choices import Choice
from pippin.quantizers.hessian import Hessian
from pippin.recipe import Recipe
from pippin.stages.calibration import Calibration
from pippin.stages.coding import refuse_infinite
from pippin.targets import check_recipe

# One row in so many is tried on every grid, and speaks for the others.
_EVERY = 8
# Points of the curve that the report keeps.
_POINTS = 25


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Choices with their bits shared out, and the report's account of it."""

    choices: dict[str, Choice]
    report: dict[str, Any]


def share_bits(
    calibration: Calibration,
    choices: dict[str, Choice],
    parts: Sequence[dict[str, str]],
    target: float,
    widths: Sequence[int] = BITS,
) -> Budget:
    """Every linear of a layer gets bits of `widths`, `target` on average: those that cost least.

    Raises ModelError where even the fewest bits are more.
    """
    if not calibration.by_loss:
        raise ModelError(
            "quantize.target_bits needs an engine with gradients of inputs",
            'set model.engine = "torch"',
        )
    offers: dict[str, list[Offer]] = {}
    for part in parts:
        linears = {n: linear for n, linear in part.items() if names.layer(n) is not None}
        for name, hessian in calibration.hessians(part):
            grid = choices[name].grid
            if name in linears and grid is not None and hessian is not None:
                offers[name] = _offers(
                    calibration, name, [replace(grid, bits=b) for b in widths], hessian
                )
    weights = {name: math.prod(calibration.checkpoint.tensors[name].shape) for name in offers}
    total = sum(weights.values())
    shared = share_out(offers, target * total)
    used = sum(offer.bits for offer in shared.offers.values()) / max(total, 1)
    if used > target:
        raise ModelError(
            f"quantize.target_bits = {target:g}: {used:.3g} bits is the least, scales counted",
            "ask for more, or for larger groups",
        )
    chosen = {n: replace(choices[n], grid=offer.grid) for n, offer in shared.offers.items()}
    return Budget(choices={**choices, **chosen}, report=_report(shared, used, total))


def holdable(recipe: Recipe, model: Path) -> tuple[int, ...]:
    """The bits that no deployment of the recipe refuses for its linears.

    Raises ModelError where there are none.
    """
    plain = replace(recipe.quantize, target_bits=None)
    asked = {bits: replace(recipe, quantize=replace(plain, bits=bits)) for bits in BITS}
    refused = {bits: check_recipe(asked[bits], model) for bits in BITS}
    if all(refused.values()):
        raise ModelError(*refused[BITS[0]][0])
    return tuple(bits for bits in BITS if not refused[bits])


def _offers(
    calibration: Calibration, name: str, grids: Sequence[Grid], hessian: Hessian
) -> list[Offer]:
    """Divergence in nats a token, to second order, of every grid."""
    checkpoint = calibration.checkpoint
    stored = checkpoint.read(name)[::_EVERY]
    refuse_infinite(name, bool(np.isfinite(stored.astype(np.float32)).all()))
    weight_RI = stored.astype(np.float32)
    outputs, inputs = checkpoint.tensors[name].shape
    share, quantizer, offers = outputs / len(weight_RI), load_quantizer("best"), []
    for tried in grids:
        codes = quantizer.quantize(weight_RI, tried, stored.dtype, hessian)
        away_RI = dequantize(codes.codes_OI, codes.scales_OG, codes.biases_OG) - weight_RI
        cost = share * hessian.output_error(away_RI) / 2 / calibration.tokens
        size = outputs * inputs * stored_bits(tried, inputs)
        offers.append(Offer(grid=tried, bits=size, cost=cost))
    return offers


def _report(shared: Shared, used: float, total: int) -> dict[str, Any]:
    """The curve of bits a linear weight against expected nats a token, and the place chosen."""
    step = max(1, len(shared.curve) // _POINTS)
    counts: dict[str, int] = {}
    for offer in shared.offers.values():
        key = f"{offer.grid.bits} bits"
        counts[key] = counts.get(key, 0) + 1
    return {
        "linear_bits": used,
        "expected_kl": sum(offer.cost for offer in shared.offers.values()),
        "tensors": dict(sorted(counts.items())),
        "curve": [(bits / max(total, 1), cost) for bits, cost in shared.curve[::step]],
    }
