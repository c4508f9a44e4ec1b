"""A whole recipe in two processes of `mlx.launch`: one run is left behind, and both end alike."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.tiny_runs import RECIPE, write_rows, write_speaking_model

pytest.importorskip("mlx.core")

pytestmark = [pytest.mark.mlx, pytest.mark.torch, pytest.mark.executorch, pytest.mark.slow]

CHANGED = {
    "[model]": '[model]\nengine = "mlx"',
    "targets = []": 'targets = ["executorch"]\ncontext = 64',
    "bits = 8\ngroup_size = 32\nembed_group_size = 32": (
        'bits = 8\ngroup_size = 0\nscheme = "symmetric"\nembed_group_size = 0\n'
        'embed_scheme = "symmetric"\n\n[qat]\nsteps = 2'
    ),
}
# The first process may write; the second finds all folders closed.
PART = """\
import os, sys
if os.environ["MLX_RANK"] == "1":
    for name in ("mkdir", "rename", "replace", "unlink", "rmdir"):
        setattr(os, name, None)
    if sys.argv[1] == "dies":
        import pippin.engines.mlx.trainer as trainer
        trainer.MlxTrainer.step = lambda *_: os._exit(9)
sys.argv = ["pippin", *sys.argv[2:]]
from pippin.cli import main
main()
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe over a small model with every stage, and the script that a process runs."""
    folder = tmp_path_factory.mktemp("ring")
    write_speaking_model(folder / "model")
    write_rows(folder / "rows")
    text = RECIPE
    for old, new in CHANGED.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "mine.toml").write_text(text)
    (folder / "part.py").write_text(PART)
    return folder


def launch(place: Path, kind: str, *command: str) -> tuple[str, str]:
    """What the two print."""
    launcher = [Path(sys.executable).with_name("mlx.launch"), "-n", "2", "--backend", "ring"]
    part = ["--", sys.executable, place / "part.py", kind, *command]
    done = subprocess.run(
        [*map(str, launcher), "--starting-port", str(free_ports()), *map(str, part)],
        cwd=place,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return done.stdout, done.stderr


def free_ports() -> int:
    """The first of two neighbours that nobody listens on."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + 1))
                return port


def errors_in(printed: str) -> list[str]:
    """Every error."""
    return [line for line in printed.splitlines() if line.startswith("error: ")]


def metrics(run: Path, stage: str) -> list[dict[str, float]]:
    lines = (run / stage / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_both_end_well_and_the_first_writes(place: Path) -> None:
    """Its losses are those of one process alone."""
    out, err = launch(place, "well", "run", "mine.toml")
    assert "error:" not in err, err
    assert "exited with code" not in err + out
    assert out.count("report: ") == 1
    assert "updates are shared by 2 processes" in err
    alone = [sys.executable, "-m", "pippin", "run", "mine.toml", "--set", 'out="alone"']
    subprocess.run(alone, cwd=place, check=True, capture_output=True)
    for stage in ("train", "qat"):
        ours, wanted = (metrics(place / run, stage) for run in ("runs/mine", "alone"))
        for mine, other in zip(ours, wanted, strict=True):
            for name in ("loss", "valid_loss", "grad_norm"):
                assert mine.get(name) == pytest.approx(other.get(name), abs=1e-4)


def test_a_comparison_is_the_first_one_s_while_the_other_waits(place: Path) -> None:
    """After the run before."""
    out, err = launch(place, "well", "quantize", "mine.toml", "--compare", "4")
    assert "error:" not in err, err
    assert "exited with code" not in err + out
    ways = {folder.name for folder in (place / "runs/mine/compare").iterdir()}
    assert "rtn-4" in ways
    assert all(out.count(way) == 1 for way in ways)


@pytest.mark.parametrize("command", ["generate model Hi", "check --engine mlx", "data mine.toml"])
def test_what_one_process_does_is_refused_once(place: Path, command: str) -> None:
    out, err = launch(place, "well", *command.split())
    (error,) = errors_in(err)
    assert f"`pippin {command.split()[0]}` is work for one process" in error
    assert "Traceback" not in err + out


def test_other_engines_are_refused_once(place: Path) -> None:
    out, err = launch(place, "well", "run", "mine.toml", "--set", 'model.engine="torch"')
    (error,) = errors_in(err)
    assert "engine torch is work for one process" in error
    assert "Traceback" not in err + out


def test_what_fails_in_the_first_ends_the_other(place: Path) -> None:
    gate = ("--set", "gates.adapter.min_exact_match=1.0", "--set", 'out="gated"')
    out, err = launch(place, "well", "run", "mine.toml", *gate)
    (error,) = errors_in(err)
    assert "min_exact_match" in error
    assert "the first process has stopped: " in err
    assert "Traceback" not in err + out


def test_the_end_of_the_other_ends_the_first(place: Path) -> None:
    """Which sees it, or is stopped by their launcher, which has seen it."""
    out, err = launch(place, "dies", "run", "mine.toml", "--set", 'out="lost"')
    (error,) = errors_in(err)
    assert error in ("error: another process of the ring has ended", "error: stopped")
    assert "Traceback" not in err + out
