"""`pippin check` over a device that crashes, hangs, refuses or miscalculates: it always reports."""

import importlib.util
import json
import sys

import pytest

from pippin import check, cli
from pippin.check import Finding, Probe
from pippin.check.audits import AUDITS
from pippin.check.judge import judge, verdict
from pippin.check.runner import Begun, Checkup
from pippin.engines import ENGINES
from pippin.errors import PippinError, UsageError

SUITE = '''
"""A device with every fault."""
import os, signal, time
from pippin.check import NotThere, Probe
from pippin.errors import UsageError

def describe(device):
    return "a broken device"

def probe(name, cases, **rest):
    return Probe(name=name, tolerance=0.1, cases=cases, remedy=f"avoid {name}", **rest)

def right():
    print("a library that talks on stdout")
    yield "here", 0.0

def crash():
    os.kill(os.getpid(), signal.SIGABRT)
    yield "never", 0.0

def leave():
    os._exit(3)
    yield "never", 0.0

def hang():
    time.sleep(60)
    yield "never", 0.0

def refuse():
    raise RuntimeError("not implemented for this device\\nsecond line")
    yield "never", 0.0

def missing():
    raise NotThere("no such unit")
    yield "never", 0.0

def coarse():
    yield "one place", 0.01
    yield "another", 0.5

def nan():
    yield "one place", float("nan")
    yield "another", 0.5

def probes(device, shapes):
    if device == "none":
        raise UsageError("device none is not there", "choose another")
    makers = (right, crash, leave, hang, refuse, missing, coarse, nan, right)
    return tuple(probe(make.__name__, make, avoid="device") for make in makers)
'''
WANTED = {
    "right": ("pass", "here"),
    "crash": ("wrong", "ended the process: SIGABRT"),
    "leave": ("wrong", "ended the process with code 3"),
    "hang": ("wrong", "no answer in 5 s, or out of memory; it was ended"),
    "refuse": ("not there", "RuntimeError: not implemented for this device"),
    "missing": ("not there", "no such unit"),
    "coarse": ("inaccurate", "another"),
    "nan": ("wrong", "one place"),
}


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """An engine whose device is broken in every way, in the place of torch's."""
    (tmp_path / "broken_suite.py").write_text(SUITE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PIPPIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(check.PROBES, "torch", "broken_suite")
    monkeypatch.setattr("pippin.check.runner.PATIENCE", 5.0)


@pytest.fixture
def broken_at_once(broken, tmp_path):
    """The same without the probe that hangs, which takes all of our patience."""
    (tmp_path / "broken_suite.py").write_text(SUITE.replace("leave, hang,", "leave,"))


def test_every_fault_becomes_a_finding(broken):
    begun, *findings = Checkup(engine="torch", patience=5.0).run()
    assert begun == Begun(where="a broken device", count=9)
    assert [found.probe for found in findings] == [*WANTED, "right"]
    for found in findings:
        assert (found.verdict, found.detail) == WANTED[found.probe]
        assert found.remedy == (
            "" if found.verdict in ("pass", "not there") else f"avoid {found.probe}"
        )
        assert found.avoid == ("device" if found.remedy else "")


def test_a_device_that_is_not_there_is_an_error(broken):
    with pytest.raises(UsageError, match="device none is not there"):
        list(Checkup(engine="torch", device="none").run())


def test_an_engine_that_does_not_start_is_an_error(monkeypatch):
    monkeypatch.setitem(check.PROBES, "gone", "no_such_module")
    with pytest.raises(PippinError, match="engine gone does not start: ModuleNotFoundError"):
        list(Checkup(engine="gone").run())


def test_unknown_engine():
    with pytest.raises(UsageError, match="has no probes"):
        list(Checkup(engine="abacus").run())


@pytest.mark.parametrize(
    ("figure", "wanted"),
    [(0.0, "pass"), (0.1, "pass"), (0.5, "inaccurate"), (1.1, "wrong"), (float("nan"), "wrong")],
)
def test_verdicts(figure, wanted):
    assert verdict(figure, 0.1) == wanted


def test_exactness_has_no_inaccurate():
    assert verdict(1e-12, 0.0) == "wrong"


def test_the_worst_case_counts_and_nan_is_the_worst():
    cases = lambda: iter([("a", 3.0), ("b", float("nan")), ("c", 9.0)])  # noqa: E731
    found = judge(Probe(name="p", tolerance=1.0, cases=cases, remedy="r"))
    assert (found.detail, found.verdict) == ("b", "wrong")


def test_the_command_prints_a_table_and_fails(broken_at_once, pippin):
    code, out, err = pippin("check", "--engine", "torch")
    assert code == 1
    assert "crash" in out
    assert "ended the process: SIGABRT" in out
    assert "avoid nan" in out
    assert "8 probes on a broken device: 2 pass, 1 inaccurate, 3 wrong, 2 not there" in out
    assert "error: wrong: crash, leave, nan (3 of 8 probes)" in err


def test_the_command_as_json(broken_at_once, pippin):
    code, out, _ = pippin("check", "--engine", "torch", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    found = [line for line in lines if line["event"] == "probe"]
    assert code == 1
    wanted = {n: v for n, (v, _) in WANTED.items() if n != "hang"}
    assert {f["probe"]: f["verdict"] for f in found} == wanted
    assert next(f for f in found if f["probe"] == "nan")["figure"] == "nan"
    assert set(found[0]) == {"event", *Finding.__dataclass_fields__}


@pytest.mark.parametrize("table", [check.PROBES, AUDITS], ids=["probes", "audits"])
def test_tables_name_modules_that_are_there(table):
    assert list(table) == sorted(table)
    assert all(importlib.util.find_spec(module) for module in table.values())


def test_every_engine_has_probes():
    assert set(check.PROBES) == set(ENGINES)


def test_no_tokens_to_decode_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pippin", "check", "--jax-fuji", "test", "--tokens", "0"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert "'--tokens'" in capsys.readouterr().err
