"""Gates: every missed limit is named with its figures, a kept one is silent."""

import math

import pytest

from pippin.errors import GateError
from pippin.recipe import Gate, Gates
from pippin.stages.gates import check_gates, let_pass, missed

SCORES = {"kl": 0.0312, "top1": 0.81, "gain_kept": 0.95, "exact_match": 0.66}


@pytest.mark.parametrize(
    ("gate", "words"),
    [
        (Gate(max_kl=0.03), "KL 0.0312 > max_kl 0.03"),
        (Gate(min_top1=0.9), "top-1 agreement 0.810 < min_top1 0.9"),
        (Gate(min_gain_kept=0.96), "gain kept 0.950 < min_gain_kept 0.96"),
        (Gate(min_exact_match=0.7), "exact match 0.660 < min_exact_match 0.7"),
    ],
)
def test_a_missed_limit_is_named_with_both_figures(gate, words):
    assert missed(SCORES, gate) == [words]


def test_limits_that_are_just_kept_are_kept():
    gate = Gate(max_kl=0.0312, min_top1=0.81, min_gain_kept=0.95, min_exact_match=0.66)
    assert missed(SCORES, gate) == []
    assert missed({}, Gate()) == []


def test_nan_and_unmeasured_miss():
    assert missed({"kl": math.nan}, Gate(max_kl=1.0))
    assert missed({"exact_match": None}, Gate(min_exact_match=0.0)) == [
        "exact match was not measured, min_exact_match is 0.0"
    ]


def test_one_position_of_a_few_may_differ_where_not_all_must_agree():
    gate = Gate(min_top1=0.97)
    assert missed({"top1": 27 / 28, "tokens": 28}, gate) == []
    assert missed({"top1": 26 / 28, "tokens": 28}, gate) == [
        "top-1 agreement 0.929 < min_top1 0.964285"
    ]
    assert let_pass({"top1": 27 / 28, "tokens": 28}, gate) == [
        "top-1 agreement 0.964 is below min_top1 0.97, by one of 28 positions: "
        "more held-out rows would tell"
    ]
    assert missed({"top1": 0.9992, "tokens": 100_000}, Gate(min_top1=0.9995))
    assert missed({"top1": 0.969, "tokens": 1000}, gate)
    assert missed({"top1": 27 / 28, "tokens": 28}, Gate(min_top1=1.0))


def test_an_adapter_that_gained_nothing_has_nothing_to_keep():
    assert missed({"gain_kept": None, "no_gain": True}, Gates().quantized) == []
    assert missed({"gain_kept": None}, Gates().quantized) != []  # not measured at all
    assert missed({"gain_kept": 0.94}, Gates().quantized) == [
        "gain kept 0.940 < min_gain_kept 0.95"
    ]


def test_a_share_of_the_gain_below_its_limit_by_chance_is_let_pass_and_told():
    gate = Gates().quantized
    near, far, fine = (
        {"gain_kept": kept, "gain_kept_error": error}
        for kept, error in ((0.91, 0.025), (0.91, 0.015), (0.95, 0.02))
    )
    assert missed(near, gate) == missed(fine, gate) == []
    assert "gain kept 0.910 is below min_gain_kept 0.95" in let_pass(near, gate)[0]
    assert let_pass(far, gate) == let_pass(fine, gate) == let_pass(near, Gate()) == []
    assert missed(far, gate) == ["gain kept 0.910 < min_gain_kept 0.95 (standard error 0.015)"]


def test_all_misses_come_in_one_error_with_a_way_out():
    gates = Gates(quantized=Gate(max_kl=0.01, min_top1=0.9))
    with pytest.raises(GateError) as caught:
        check_gates("quantized", SCORES, gates)
    assert caught.value.message == (
        "quantized: KL 0.0312 > max_kl 0.01; top-1 agreement 0.810 < min_top1 0.9"
    )
    assert "quantize.bits" in caught.value.hint


def test_every_target_shares_the_deployed_gate_and_the_base_has_none():
    gates = Gates(deployed=Gate(min_top1=0.9))
    with pytest.raises(GateError, match="deployed-executorch: top-1"):
        check_gates("deployed-executorch", SCORES, gates)
    check_gates("base", SCORES, gates)


def test_figures_that_round_to_their_limit_are_written_out():
    assert missed({"kl": 2.1e-12}, Gate(max_kl=0.0)) == ["KL 2.1e-12 > max_kl 0.0"]
    assert missed({"top1": 0.98996}, Gate(min_top1=0.99)) == [
        "top-1 agreement 0.98996 < min_top1 0.99"
    ]


@pytest.mark.parametrize(("answered", "passes"), [(0.5, True), (0.496, True), (0.49, False)])
def test_of_few_rows_the_parents_figure_is_enough(answered, passes):
    """Measured on rows of which the parent itself answers half."""
    scores = {"exact_match": answered, "same_rows": {"exact_match": 0.5}}
    found = missed(scores, Gate(min_exact_match=0.8))
    assert found == ([] if passes else ["exact match 0.490 < min_exact_match 0.495"])
    assert missed({"exact_match": answered}, Gate(min_exact_match=0.8))
