"""What the machine tells, and limits of containers, read from written files."""

import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from pippin import machine
from pippin.engines import host
from pippin.machine import Accelerator, find_machine

GB = 10**9


def test_this_machine():
    found = find_machine()
    assert found.chip
    assert 1 <= found.cores <= os.cpu_count()
    assert 0 < found.memory_available <= found.memory_total <= psutil.virtual_memory().total
    assert found.gflops > 0.1
    assert "torch" in found.engines
    assert found.device("cpu") == "cpu"
    assert found.device("auto") == (found.accelerator.kind if found.accelerator else "cpu")


@pytest.fixture
def files(monkeypatch):
    """Written files in the place of the machine's own."""
    texts: dict[str, str] = {}
    monkeypatch.setattr(machine, "_text", lambda path: texts.get(path, ""))
    host = SimpleNamespace(total=64 * GB, available=50 * GB)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: host)
    return texts


def test_without_a_container(files):
    assert machine.memory() == (64 * GB, 50 * GB)


def test_container_limit_counts(files):
    files["/sys/fs/cgroup/memory.max"] = f"{8 * GB}\n"
    files["/sys/fs/cgroup/memory.current"] = f"{3 * GB}\n"
    assert machine.memory() == (8 * GB, 5 * GB)
    files["/sys/fs/cgroup/memory.stat"] = f"anon 1\ninactive_file {GB}\n"
    assert machine.memory() == (8 * GB, 6 * GB), "file cache is given back on demand"


def test_unlimited_container(files):
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert machine.memory() == (64 * GB, 50 * GB)


def test_older_container(files):
    files["/sys/fs/cgroup/memory/memory.limit_in_bytes"] = str(4 * GB)
    files["/sys/fs/cgroup/memory/memory.usage_in_bytes"] = str(1 * GB)
    assert machine.memory() == (4 * GB, 3 * GB)


def test_quota_of_cores(tmp_path, monkeypatch):
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(host, "QUOTA", quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    assert host.cores() == 16
    for text, cores in (("150000 100000", 1), ("max 100000", 16), ("400000 100000", 4)):
        quota.write_text(text)
        assert host.cores() == cores


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/cpuinfo")
@pytest.mark.parametrize(
    ("text", "native"),
    [
        ("model name\t: X\nflags\t\t: fpu avx2 avx512_bf16\n", True),
        ("model name\t: X\nflags\t\t: fpu avx2 avx512f\n", False),
        ("Features\t: fp asimd bf16\n", True),
        ("", False),
    ],
)
def test_bfloat16_by_the_flags_of_the_chip(files, text, native):
    files["/proc/cpuinfo"] = text
    assert machine.native_bfloat16() is native


@pytest.fixture
def nvidia(monkeypatch):
    """A machine with nvidia-smi, which answers with the text given."""

    def answer(text: str, build: str = "2.13.0"):
        monkeypatch.setattr(machine.shutil, "which", lambda name: f"/usr/bin/{name}")
        monkeypatch.setattr(machine, "_output", lambda *command: text)
        monkeypatch.setattr(machine.importlib.metadata, "version", lambda _: build)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        return machine._cuda()

    return answer


def test_cuda(nvidia, monkeypatch):
    found = nvidia("NVIDIA H200, 143771, 143000\nNVIDIA H200, 143771, 1\n")
    assert (found.kind, found.name) == ("cuda", "NVIDIA H200")
    assert found.memory_available == 143000 * 2**20
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine._cuda() is None


def test_no_cuda(nvidia):
    assert nvidia("NVIDIA H200, 143771, 143000", build="2.13.0+cpu") is None
    assert nvidia("No devices were found") is None
    assert nvidia("") is None


def test_commands_that_fail_say_nothing(tmp_path):
    assert machine._output("no-such-command-here") == ""
    assert machine._output(sys.executable, "-c", "raise SystemExit(3)") == ""
    assert machine._text(str(tmp_path / "none")) == ""


def test_an_engine_has_the_accelerators_it_can_use():
    card = Accelerator(kind="cuda", name="card", memory_total=GB, memory_available=GB)
    machine = replace(find_machine(), accelerator=card, accelerated=("torch",))
    assert machine.device("auto", "torch") == "cuda"
    assert machine.device("auto", "mlx") == "cpu"
    assert machine.devices("mlx") == ["cpu"]
    assert machine.device("cpu", "torch") == "cpu"


@pytest.fixture
def mac(monkeypatch):
    """A Mac as Python sees it: its processor's name, its macOS, what sysctl answers."""

    def make(version: str, processor: str = "arm64", answers: dict[str, str] | None = None):
        monkeypatch.setattr(machine.platform, "system", lambda: "Darwin")
        monkeypatch.setattr(machine.platform, "machine", lambda: processor)
        monkeypatch.setattr(machine.platform, "mac_ver", lambda: (version, ("", "", ""), ""))
        known = {"machdep.cpu.brand_string": "Apple M2 Pro", **(answers or {})}
        monkeypatch.setattr(machine, "_output", lambda *command: known.get(command[-1], ""))
        return find_machine()

    return make


def test_a_mac(mac):
    found = mac("14.5")
    assert (found.accelerator.kind, found.accelerator.name) == ("mps", "Apple M2 Pro")
    assert found.shared_memory
    assert found.lacking == ""


def test_a_macos_that_is_too_old(mac):
    found = mac("13.6.1")
    assert found.accelerator is None
    assert found.lacking == "macOS 13.6.1 is older than 14.0"


def test_a_python_for_intel(mac):
    found = mac("15.0", "x86_64", {"sysctl.proc_translated": "1"})
    assert found.accelerator is None
    assert found.lacking == "this Python is for Intel and runs under Rosetta"
    assert mac("15.0", "x86_64").lacking == ""


def test_a_card_that_cannot_be_used(nvidia, monkeypatch):
    nvidia("NVIDIA H200, 143771, 143000", build="2.13.0+cpu")
    assert machine.why_no_gpu() == "the installed PyTorch is a build for CPUs"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert machine.why_no_gpu() == "CUDA_VISIBLE_DEVICES=-1 hides it"
