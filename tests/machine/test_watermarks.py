"""PyTorch's two memory limits on MPS: always both, never contradicting each other."""

import os
from dataclasses import replace

import pytest
from tests.tiny_runs import RECIPE, write_speaking_model

from pippin.errors import UsageError
from pippin.machine import find_machine
from pippin.machine.watermarks import FALLBACK, HIGH, LOW, set_watermarks
from pippin.plan import make_plan
from pippin.recipe_file import load_recipe
from pippin.run import run, with_refusals


def test_other_devices_are_left_alone():
    environment = {}
    assert set_watermarks("cuda", environment) == ()
    assert environment == {}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, ("1", "0.8")),
        ({HIGH: "0.5"}, ("0.5", "0.4")),  # alone PyTorch refuses it: its own lower mark is 1.4
        ({LOW: "1.2"}, ("1.2", "1.2")),
        ({HIGH: "1.1", LOW: "0.9"}, ("1.1", "0.9")),
        ({HIGH: "0"}, ("0", "0")),  # no limit
    ],
)
def test_both_are_set_and_told(before, after):
    environment = dict(before)
    (told,) = set_watermarks("mps", environment)
    assert (environment[HIGH], environment[LOW]) == after
    assert float(after[1]) <= float(after[0])
    assert f"{HIGH}={after[0]}" in told


@pytest.mark.parametrize("high", ["1", "1.3"])
def test_a_limit_that_the_machine_has(high):
    assert "nothing stops PyTorch" not in set_watermarks("mps", {HIGH: high})[0]


@pytest.mark.parametrize("high", ["1.7", "0"])
def test_a_limit_above_the_machine_is_told(high):
    assert "nothing stops PyTorch" in set_watermarks("mps", {HIGH: high})[0]


def test_a_run_sets_them_before_anything_else(tmp_path, monkeypatch):
    for name in (HIGH, LOW):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    write_speaking_model(tmp_path / "model")
    (tmp_path / "tiny.toml").write_text(RECIPE)
    plan = make_plan(load_recipe(tmp_path / "tiny.toml"), find_machine())
    first = next(run(replace(plan, device="mps")))
    assert first.text.startswith(f"{HIGH}=1, {LOW}=0.8")
    assert (os.environ[HIGH], os.environ[LOW]) == ("1", "0.8")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({HIGH: "1.0", LOW: "1.4"}, "above"),
        ({HIGH: "much"}, "HIGH_WATERMARK_RATIO=much is no ratio"),
        ({LOW: "-1"}, "is no ratio"),
        ({LOW: "nan"}, "is no ratio"),
        ({HIGH: "inf"}, "is no ratio"),
    ],
)
def test_what_pytorch_would_refuse(environment, message):
    with pytest.raises(UsageError, match=message):
        set_watermarks("mps", environment)


def test_a_fallback_without_a_word_is_told():
    assert len(set_watermarks("mps", {FALLBACK: "0"})) == 1
    assert "runs on the CPU, slowly" in set_watermarks("mps", {FALLBACK: "1"})[1]


def test_a_plan_tells_what_a_run_would_say_and_sets_nothing(tmp_path, monkeypatch):
    write_speaking_model(tmp_path / "model")
    (tmp_path / "tiny.toml").write_text(RECIPE)
    plan = make_plan(load_recipe(tmp_path / "tiny.toml"), find_machine())
    plan = replace(plan, device="mps")
    monkeypatch.delenv(HIGH, raising=False)
    monkeypatch.setenv(LOW, "0.5")
    assert with_refusals(plan).notices[-1].startswith(f"{HIGH}=1, {LOW}=0.5")
    assert HIGH not in os.environ
    monkeypatch.setenv(LOW, "half")
    assert (f"{LOW}=half is no ratio", f"unset {LOW}: pippin sets it") in with_refusals(
        plan
    ).refusals
