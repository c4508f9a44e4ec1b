"""Machines that are not here: their memory, what a GPU may take of it, and the plan for them."""

import pytest

from pippin.errors import UsageError
from pippin.machine import GIB, find_machine, working_set
from pippin.machine.chips import Elsewhere, load_chips, parse_memory


# As llama.cpp prints Metal's recommendation, in MiB: llama-cpp-python#687, llama.cpp#2011, #3213.
@pytest.mark.parametrize(("gb", "mib"), [(16, 10922.67), (32, 21845.34), (96, 73728.0)])
def test_the_recommended_share_is_what_metal_says(gb, mib):
    assert working_set(gb * GIB) / 2**20 == pytest.approx(mib, abs=0.01)


@pytest.mark.parametrize("text", ["16GB", "16 gb", "16GiB", "16", "16.0G"])
def test_memory_as_people_write_it(text):
    assert parse_memory(text) == 16 * GIB


@pytest.mark.parametrize("text", ["", "GB", "-4GB", "0GB", "16TB", "sixteen"])
def test_memory_that_is_none(text):
    with pytest.raises(UsageError, match="no size of memory"):
        parse_memory(text)


def test_every_family_is_there():
    chips = load_chips()
    assert {name.partition("-")[0] for name in chips} == {"m1", "m2", "m3", "m4", "m5"}
    for chip in chips.values():
        assert list(chip.memory) == sorted(chip.memory)
        assert chip.source.startswith("https://")
        base = chips[chip.name.partition("-")[0]]
        assert chip.bandwidth >= base.bandwidth


def test_a_mac_shares_its_memory():
    there = Elsewhere(memory="16GB", device="mps", chip="m2-pro").machine(find_machine())
    assert there.device("auto") == "mps"
    assert there.shared_memory
    assert there.memory_total == 16 * GIB
    assert there.memory_available == there.accelerator.memory_available == working_set(16 * GIB)
    assert there.chip == "m2-pro, 200 GB/s"


def test_a_gpu_has_its_own():
    here = find_machine()
    there = Elsewhere(memory="24GB", device="cuda").machine(here)
    assert there.accelerator.memory_available == 24 * GIB
    assert there.memory_total == here.memory_total


def test_nothing_asked_is_here():
    here = find_machine()
    assert Elsewhere().machine(here) is here


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"device": "mps"}, "needs its memory"),
        ({"memory": "16GB", "chip": "m9"}, "chip m9 is not known"),
        ({"memory": "17GB", "chip": "m1"}, "no m1 has 17GB"),
        ({"memory": "16GB", "chip": "m1", "device": "cuda"}, "chip m1 has no cuda"),
    ],
)
def test_machines_that_do_not_exist(asked, message):
    with pytest.raises(UsageError, match=message):
        Elsewhere(**asked).machine(find_machine())
