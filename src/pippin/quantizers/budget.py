"""Bits shared out under a budget, so that what the tensors cost together is least.

Every tensor offers some grids, each for so many bits at such a cost. From the fewest bits on, the
step worth most per bit is taken, of all steps along the lower convex hulls of the tensors' offers.
Nothing else with as many bits costs less.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pippin.quantizers import Grid


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """One way to store a tensor: all of its bits, scales counted, and what that costs in nats.

    Without a grid it stays as it is.
    """

    grid: Grid | None
    bits: float
    cost: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """What was chosen by tensor, and the way there: (bits, cost) of all tensors at every step."""

    offers: dict[str, Offer]
    curve: tuple[tuple[float, float], ...]


def stored_bits(grid: Grid, inputs: int) -> float:
    """Bits of a weight of such a grid: its code, and its share of a 2-byte scale and zero point."""
    shared = inputs if grid.per_channel else grid.group_size
    return grid.bits + (16 if grid.symmetric else 32) / shared


def share_out(
    offers: Mapping[str, Sequence[Offer]], most: float = math.inf, enough: float = 0.0
) -> Shared:
    """The offers with the least cost within `most` bits, or the fewest bits that cost `enough`.

    The fewest of all where even they exceed, the most where they cost more. The curve goes on
    beyond what was chosen, to the most bits on offer.
    """
    hulls = {name: _hull(some) for name, some in offers.items()}
    taken = {name: hull[0] for name, hull in hulls.items()}
    bits, cost = (sum(getattr(o, key) for o in taken.values()) for key in ("bits", "cost"))
    curve, chosen = [(bits, cost)], dict(taken)
    steps = [_step(name, hull, 1) for name, hull in hulls.items() if len(hull) > 1]
    heapq.heapify(steps)
    while steps:
        _, name, place = heapq.heappop(steps)
        before, after = hulls[name][place - 1 : place + 1]
        wanting = cost > enough
        bits, cost = bits + after.bits - before.bits, cost + after.cost - before.cost
        curve.append((bits, cost))
        if bits <= most and wanting:
            chosen[name] = after
        if place + 1 < len(hulls[name]):
            heapq.heappush(steps, _step(name, hulls[name], place + 1))
    return Shared(offers=chosen, curve=tuple(curve))


def _step(name: str, hull: Sequence[Offer], place: int) -> tuple[float, str, int]:
    """The one worth most per bit sorts first."""
    return _slope(hull[place - 1], hull[place]), name, place


def _slope(few: Offer, many: Offer) -> float:
    return (many.cost - few.cost) / (many.bits - few.bits)


def _hull(offers: Sequence[Offer]) -> list[Offer]:
    """Those no mixture of two others beats, by rising bits and falling cost."""
    hull: list[Offer] = []
    for offer in sorted(offers, key=lambda o: (o.bits, o.cost)):
        if hull and offer.cost >= hull[-1].cost:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], offer):
            hull.pop()
        hull.append(offer)
    return hull
