"""Bits under a budget: what every linear costs on each grid is measured, then bits are shared out.

Shape letters: O output features, I input features, R the rows that are tried.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pippin.errors import ModelError
from pippin.figures import bytes_of, bytes_text
from pippin.model import names
from pippin.model.quantized import BITS, dequantize
from pippin.model.weights import nbytes
from pippin.quantizers import Grid, load_quantizer
from pippin.quantizers.budget import Offer, Shared, share_out
from pippin.quantizers.choices import Choice
from pippin.quantizers.hessian import Hessian
from pippin.recipe import Quantize, Recipe
from pippin.stages.calibration import Calibration
from pippin.stages.coding import refuse_infinite
from pippin.targets import check_recipe, stored_bits

# One row in so many is tried on every grid, and speaks for the others.
_EVERY = 8
# Nats that are measured for each that the second order expects of rows that do not make up for each
# other: 1.34 to 1.49 on SmolLM2, at 3.5, 4.25 and 4.5 bits, and with the embedding at 4.5.
_MEASURED = 1.4
# Points of the curve that the report keeps.
_POINTS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Choices with their bits shared out, and the report's account of it: bits, nats, the curve."""

    choices: dict[str, Choice]
    report: dict[str, Any]

    @property
    def text(self) -> str:
        """What was chosen, and what a smaller and a larger model would be expected to lose."""
        made = self.report
        widths = ", ".join(f"{count} of {bits}" for bits, count in made["tensors"].items())
        return (
            f"{made['linear_bits']:.2f} bits a linear's weight ({widths}): "
            f"{bytes_text(made['size_bytes'])}, expected KL {made['expected_kl']:.2g}; "
            + ", ".join(f"at {bytes_text(size)} {kl:.2g}" for size, kl in self._others())
        )

    def _others(self) -> list[tuple[int, float]]:
        """The points of the curve nearest to four other sizes."""
        curve, size = self.report["curve"], self.report["size_bytes"]
        wanted = [share * size for share in (0.8, 0.9, 1.1, 1.25)]
        nearest = {min(curve, key=lambda point: abs(point[0] - other)) for other in wanted}
        return sorted(nearest)


def share_bits(
    calibration: Calibration,
    choices: dict[str, Choice],
    parts: Sequence[dict[str, str]],
    recipe: Recipe,
) -> Budget:
    """Every linear gets the bits that cost least under the recipe's budget.

    So do embedding and head where the budget counts them. Sizes are what the recipe's targets
    store. Raises ModelError where even the fewest bits are more than asked for, or the most leave
    more nats.
    """
    settings = recipe.quantize
    if not calibration.by_loss:
        raise ModelError(
            f"quantize.{settings.budget} needs an engine with gradients of inputs",
            'set model.engine = "torch"',
        )
    offered = offered_grids(recipe, calibration.checkpoint.folder)
    around = _around_layers(recipe, calibration.checkpoint.folder, offered[0])
    offers: dict[str, list[Offer]] = {}
    for part in parts:
        for name, hessian in calibration.hessians(part):
            grid, changes = choices[name].grid, offered if names.layer(name) is not None else around
            if changes and grid is not None and hessian is not None:
                tried = [replace(grid, **change) for change in changes]
                offers[name] = _offers(calibration, name, tried, hessian, recipe)
    scale = _Scale.of(calibration, choices, offers, recipe)
    shared = share_out(offers, scale.most_bits(settings), (settings.max_kl or 0.0) / _MEASURED)
    report = scale.report(shared, settings)
    _refuse_missed(settings, report)
    chosen = {name: _chosen(choices[name], offer) for name, offer in shared.offers.items()}
    return Budget(choices={**choices, **chosen}, report=report)


def shares_embeddings(settings: Quantize) -> bool:
    """Whether embedding and head are in the budget: it is one of the whole model."""
    return settings.max_size is not None or settings.max_kl is not None


def offered_grids(recipe: Recipe, model: Path) -> list[dict[str, Any]]:
    """What differs between the grids a linear may get; a scale a channel where groups are refused.

    Raises ModelError where no deployment holds any.
    """
    channels = replace(recipe, quantize=replace(recipe.quantize, group_size=0))
    grouped = holdable(recipe, model)
    others = [bits for bits in holdable(channels, model) if bits not in grouped]
    return [
        *({"bits": bits} for bits in grouped),
        *({"bits": bits, "per_channel": True} for bits in others),
    ]


def _around_layers(recipe: Recipe, model: Path, linears: dict[str, Any]) -> list[dict[str, Any]]:
    """The same for embedding and head beside such linears; nothing where they have their bits."""
    if not shares_embeddings(recipe.quantize):
        return []
    size = {"group_size": 0} if "per_channel" in linears else {}
    beside = replace(recipe.quantize, bits=linears["bits"], **size)
    return [{"bits": b} for b in holdable(replace(recipe, quantize=beside), model, "embed_bits")]


def holdable(recipe: Recipe, model: Path, key: str = "bits") -> tuple[int, ...]:
    """The bits that no deployment of the recipe refuses for its linears, or as `embed_bits`.

    Raises ModelError where there are none.
    """
    plain = replace(recipe.quantize, target_bits=None, max_size=None, max_kl=None)
    asked = {bits: replace(recipe, quantize=replace(plain, **{key: bits})) for bits in BITS}
    refused = {bits: check_recipe(asked[bits], model) for bits in BITS}
    if all(refused.values()):
        raise ModelError(*refused[BITS[0]][0])
    return tuple(bits for bits in BITS if not refused[bits])


def _offers(
    calibration: Calibration, name: str, grids: Sequence[Grid], hessian: Hessian, recipe: Recipe
) -> list[Offer]:
    """What every grid costs in nats a token, to second order; weights as they are cost none."""
    checkpoint = calibration.checkpoint
    stored = checkpoint.read(name)[::_EVERY]
    refuse_infinite(name, bool(np.isfinite(stored.astype(np.float32)).all()))
    weight_RI = stored.astype(np.float32)
    outputs, inputs = checkpoint.tensors[name].shape
    share, quantizer = outputs / len(weight_RI), load_quantizer("best")
    offers = [Offer(grid=None, bits=8.0 * nbytes(checkpoint.tensors[name]), cost=0.0)]
    for tried in grids:
        codes = quantizer.quantize(weight_RI, tried, stored.dtype, hessian)
        away_RI = dequantize(codes.codes_OI, codes.scales_OG, codes.biases_OG) - weight_RI
        cost = share * hessian.output_error(away_RI) / 2 / calibration.tokens
        size = outputs * inputs * stored_bits(recipe, tried, inputs)
        offers.append(Offer(grid=tried, bits=size, cost=cost))
    return offers


def _chosen(choice: Choice, offer: Offer) -> Choice:
    why = choice.why if offer.grid else "the budget has bits enough"
    return replace(choice, grid=offer.grid, why=why)


def _refuse_missed(settings: Quantize, report: Mapping[str, Any]) -> None:
    bits, size, kl = (report[key] for key in ("linear_bits", "size_bytes", "expected_kl"))
    more = "ask for more, or for larger groups"
    if settings.target_bits is not None and bits > settings.target_bits:
        raise ModelError(
            f"quantize.target_bits = {settings.target_bits:g}: {bits:.3g} bits is the least, "
            "scales counted",
            more,
        )
    if settings.max_size is not None and size > (bytes_of(settings.max_size) or 0):
        raise ModelError(
            f"quantize.max_size = {settings.max_size}: {bytes_text(size)} is the least, "
            "embedding and scales counted",
            f"{more}, or set quantize.embed_bits = 4",
        )
    if settings.max_kl is not None and kl > settings.max_kl:
        raise ModelError(
            f"quantize.max_kl = {settings.max_kl:g}: {kl:.2g} nats is the least expected",
            "ask for more, or for smaller groups",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scale:
    """Weights of the layers that bits are shared out over, and bits of what they are not for."""

    weights: int
    others: float

    @classmethod
    def of(
        cls,
        calibration: Calibration,
        choices: Mapping[str, Choice],
        offers: Mapping[str, Sequence[Offer]],
        recipe: Recipe,
    ) -> "_Scale":
        tensors, others = calibration.checkpoint.tensors, 0.0
        for name in choices.keys() - offers.keys():
            info, grid = tensors[name], choices[name].grid
            dense = 8.0 * nbytes(info)
            count = math.prod(info.shape)
            others += count * stored_bits(recipe, grid, info.shape[1]) if grid else dense
        weights = sum(
            math.prod(tensors[name].shape) for name in offers if names.layer(name) is not None
        )
        return cls(weights=weights, others=others)

    def most_bits(self, settings: Quantize) -> float:
        """Bits that all linears may take."""
        if settings.max_size is not None:
            return 8.0 * (bytes_of(settings.max_size) or 0) - self.others
        return math.inf if settings.target_bits is None else settings.target_bits * self.weights

    def report(self, shared: Shared, settings: Quantize) -> dict[str, Any]:
        """The place chosen, and the curve of bytes of all weights against expected nats a token."""
        widths = [offer.grid.bits if offer.grid else 16 for offer in shared.offers.values()]
        used = sum(offer.bits for offer in shared.offers.values())
        in_layers = sum(o.bits for n, o in shared.offers.items() if names.layer(n) is not None)
        cost = sum(offer.cost for offer in shared.offers.values())
        ends = np.linspace(0, len(shared.curve) - 1, min(_POINTS, len(shared.curve)))
        points = [shared.curve[round(place)] for place in ends]
        counts = {bits: widths.count(bits) for bits in sorted(set(widths))}
        assert settings.budget is not None
        return {
            "asked": {settings.budget: getattr(settings, settings.budget)},
            "linear_bits": in_layers / max(self.weights, 1),
            "size_bytes": self._bytes(used),
            "expected_kl": _MEASURED * cost,
            "tensors": {f"{bits} bits": count for bits, count in counts.items()},
            "curve": [(self._bytes(bits), _MEASURED * max(cost, 0.0)) for bits, cost in points],
        }

    def _bytes(self, bits: float) -> int:
        return round((bits + self.others) / 8)
