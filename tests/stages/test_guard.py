"""The guard of a training: what it calls scarce, and how the plan's figure is corrected."""

import mmap
import platform
import sys
from types import SimpleNamespace

import pytest
import torch

from pippin import machine
from pippin.engines.torch.unified import UnifiedEngine
from pippin.stages import guard
from pippin.stages.guard import Guard

GB = 10**9


class Host:
    """An engine on a CPU whose process has peaked at `peak`."""

    def __init__(self, peak=0):
        self.peak = peak

    def device(self):
        return "cpu (2 cores)"

    def peak_memory(self):
        return self.peak


@pytest.fixture
def surroundings(monkeypatch):
    """A machine of 16 GB, as the guard sees it."""
    seen = SimpleNamespace(free=8 * GB, held=2 * GB)
    monkeypatch.setattr(guard, "memory", lambda: (16 * GB, seen.free))
    monkeypatch.setattr(guard, "footprint", lambda: seen.held)
    return seen


def watch(engine, planned=2 * GB, before=GB):
    return Guard(engine=engine, planned=planned, before=before)


def test_the_plan_is_corrected_by_what_was_measured(surroundings):
    engine = Host(peak=GB)
    ours = watch(engine)
    assert ours.settle() is None, "an earlier stage hides the peak"
    engine.peak = 2 * GB + GB // 2
    assert ours.settle() == (
        "memory peaked at 2.50 GB in the first 3 updates, 25.0% above the plan's 2.00 GB: "
        "the guard goes by what was measured"
    )
    assert watch(engine, planned=None).settle() == (
        "memory peaked at 2.50 GB in the first 3 updates"
    )


def test_it_stops_before_an_update_that_does_not_fit(surroundings):
    """It goes by the measured figure, not by the plan's, which was too low."""
    ours = watch(Host(peak=4 * GB))
    surroundings.free = GB
    assert ours.scarcity() is None
    ours.settle()
    assert ours.scarcity() == "the next update takes 2.00 GB more, 1.00 GB are left"
    surroundings.free = 3 * GB
    assert ours.scarcity() is None


def test_memory_that_was_swapped_out_counts(surroundings):
    """The system says that much is free, because this process was swapped or compressed."""
    surroundings.held = 16 * GB
    text = watch(Host()).scarcity()
    assert text == "this process holds 16.00 GB, swapped and compressed memory counted"


def test_the_drivers_figure_counts_after_caches_are_emptied(surroundings, monkeypatch):
    given = {"now": 9 * GB}
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 10 * GB)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: given["now"])
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: given.update(now=given["now"] - GB // 4))
    ours = watch(UnifiedEngine(torch.device("mps")))
    assert ours.scarcity() is None
    assert given["now"] == 9 * GB, "no cache is emptied where there is room"
    given["now"] = 10 * GB
    assert ours.scarcity() is None
    assert given["now"] == 9.75 * GB
    given["now"] = int(10.2 * GB)
    assert ours.scarcity() == (
        "the GPU's driver has given 9.95 GB of the 10.00 GB that it recommends to take"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_this_process_holds():
    before = machine.footprint()
    block = mmap.mmap(-1, 64 << 20)  # not from a heap, which may have kept as much
    for page in range(0, len(block), mmap.PAGESIZE):
        block[page] = 1
    assert machine.footprint() - before == pytest.approx(len(block), rel=0.1)


def test_macos_counts_its_own_way(monkeypatch):
    def ask(process, flavor, info):
        info._obj[9] = 5 * GB
        return 0

    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    library = SimpleNamespace(proc_pid_rusage=ask)
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda _: library)
    assert machine.footprint() == 5 * GB
    library.proc_pid_rusage = lambda *_: -1
    assert 0 < machine.footprint() < 5 * GB, "the resident set, where macOS does not answer"
