"""A program on a real device: its own dispatcher's refusals, told as the simulator tells its own.

No Mac is here. The meta device stands in: PyTorch's dispatcher has no kernels of some operators for
it and says so in the same words.
"""

import warnings
from pathlib import Path

import pytest
import torch
from tests.engines import programs
from torch.library import Library

from pippin.check.audits import Ask
from pippin.engines.torch.mps import apart
from pippin.engines.torch.mps.observer import Observer
from pippin.engines.torch.mps.rules import make_rules
from pippin.engines.torch.mps.verdicts import MpsOffence
from pippin.errors import ModelError

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def rules():
    return make_rules()


@pytest.fixture
def leaving(rules):
    """An operator that says it leaves the device, as MPS's fallback does, beside an absent one."""

    def leave(x):
        warnings.warn(
            "The operator 'aten::x' is not currently supported on the MPS backend and will "
            "fall back to run on the CPU. This may have performance implications.",
            stacklevel=1,
        )
        return x.clone()

    library = Library("pippin_observer", "DEF")
    library.define("leaving(Tensor x) -> Tensor")
    library.impl("leaving", leave, "Meta")
    library.define("absent(Tensor x) -> Tensor")
    library.impl("absent", torch.clone, "CPU")
    yield torch.ops.pippin_observer.leaving
    library._destroy()


def test_what_runs_is_native(rules):
    with Observer(rules, device="meta") as watched:
        x = torch.ones(3, 4, device="meta")
        (x @ x.T).sum()
        torch.ones(2).add(1)  # elsewhere: not judged
    assert watched.report.offences() == []
    assert "aten.mm.default" in watched.report.operators
    assert "aten.add.Tensor" not in watched.report.operators


def test_what_the_dispatcher_lacks_is_unsupported(rules, leaving):
    with Observer(rules, device="meta") as watched, pytest.raises(RuntimeError):
        torch.ops.pippin_observer.absent(torch.ones(3, device="meta"))
    (offence,) = watched.report.offences()
    assert (offence.operator, offence.verdict.kind) == (
        "pippin_observer.absent.default",
        "unsupported",
    )
    assert offence.verdict.remedy
    assert "test_mps_observer.py:" in offence.where


def test_what_leaves_the_device_is_a_fallback_every_time(rules, leaving):
    with Observer(rules, device="meta") as watched:
        for _ in range(2):
            leaving(torch.ones(3, device="meta"))
    (offence,) = watched.report.offences()
    assert (offence.verdict.kind, offence.count) == ("fallback", 2)
    assert not torch.is_warn_always_enabled()


def test_what_refuses_its_arguments_is_a_limit(rules):
    with Observer(rules, device="meta") as watched, pytest.raises(RuntimeError):
        torch.ones(2, 3, device="meta").mm(torch.ones(2, 3, device="meta"))
    assert [o.verdict.kind for o in watched.report.offences()] == ["limit"]


def test_strict_raises_with_file_and_line(rules, leaving):
    told = pytest.raises(MpsOffence, match=r"fallback: .*leaving.* at .*test_mps_observer.py:\d+")
    with told, Observer(rules, strict=True, device="meta"):
        leaving(torch.ones(3, device="meta"))


def test_a_program_that_ends_its_process_is_an_error_in_the_report(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # where a spawned process finds it too
    (found,) = apart.apart("tiny", "LoRA step", programs.end, Ask())
    assert (found.subject, found.program, found.outcome) == ("tiny", "LoRA step", "error")
    assert "ended its process" in found.error
    assert apart.apart("tiny", "step", programs.answer, Ask(strict=True))[0].error == "strict True"
    with pytest.raises(ModelError, match="no") as caught:
        apart.apart("tiny", "step", programs.refuse, Ask())
    assert caught.value.hint == "yes"


def test_when_the_gpu_itself_is_asked(monkeypatch):
    assert not apart.is_real(Ask())
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert apart.is_real(Ask())
    assert not apart.is_real(Ask(chip="m1"))
    assert not apart.is_real(Ask(version="2.14"))
    monkeypatch.setattr(apart, "chip_name", lambda: "Apple M2 Pro")
    assert apart.chip_here() == "m2"
