"""Bits shared out: against every way there is to share them."""

import itertools

import numpy as np
import pytest

from pippin.quantizers import Grid
from pippin.quantizers.budget import Offer, share_out, stored_bits


def _offers(seed: int) -> dict[str, list[Offer]]:
    """Tensors of one size, whose error falls fourfold a bit, more or less."""
    rng = np.random.default_rng(seed)
    offers = {}
    for name in "abcdef":
        worth = float(np.exp(rng.normal(0, 1.5)))
        offers[name] = [
            Offer(
                grid=Grid(bits=bits, group_size=64, symmetric=True),
                bits=100.0 * bits,
                cost=worth * 4.0**-bits * float(rng.uniform(0.9, 1.1)),
            )
            for bits in (3, 4, 5)
        ]
    return offers


@pytest.mark.parametrize("seed", range(8))
def test_nothing_with_as_many_bits_costs_less(seed: int) -> None:
    offers = _offers(seed)
    for budget in (1800.0, 2250.0, 2400.0, 2777.0, 3000.0):
        shared = share_out(offers, budget)
        bits = sum(o.bits for o in shared.offers.values())
        cost = sum(o.cost for o in shared.offers.values())
        assert bits <= budget
        ways = itertools.product(*offers.values())
        least = min(sum(o.cost for o in w) for w in ways if sum(o.bits for o in w) <= bits)
        assert cost == pytest.approx(least)
        assert bits > budget - 100 or bits == 3000


def test_enough_is_the_fewest_bits_that_cost_so_much() -> None:
    everything = share_out(_offers(0))
    assert {offer.grid and offer.grid.bits for offer in everything.offers.values()} == {5}
    for bits, cost in everything.curve:
        some = share_out(_offers(0), enough=cost * (1 + 1e-9)).offers.values()
        assert sum(offer.bits for offer in some) == bits


def test_the_curve_goes_from_the_fewest_bits_to_the_most() -> None:
    curve = share_out(_offers(0), 0.0).curve
    assert (curve[0][0], curve[-1][0]) == (1800, 3000)
    slopes = [(d - b) / (c - a) for (a, b), (c, d) in itertools.pairwise(curve)]
    assert slopes == sorted(slopes)
    assert all(slope < 0 for slope in slopes)


def test_a_budget_below_the_fewest_bits_gives_the_fewest() -> None:
    shared = share_out(_offers(1), 1000.0)
    assert {o.grid and o.grid.bits for o in shared.offers.values()} == {3}


def test_an_offer_that_two_others_beat_is_left_out() -> None:
    grid = Grid(bits=4, group_size=64, symmetric=True)
    some = [Offer(grid=grid, bits=b, cost=c) for b, c in ((1.0, 9.0), (2.0, 8.0), (3.0, 1.0))]
    assert share_out({"a": some}, 2.5).offers["a"].bits == 1
    assert share_out({"a": some}, 3.0).offers["a"].bits == 3


def test_stored_bits_count_scales() -> None:
    symmetric, affine = (Grid(bits=4, group_size=64, symmetric=s) for s in (True, False))
    assert (stored_bits(symmetric, 576), stored_bits(affine, 576)) == (4.25, 4.5)
    row = Grid(bits=8, group_size=64, symmetric=True, per_channel=True)
    assert stored_bits(row, 512) == 8 + 16 / 512
