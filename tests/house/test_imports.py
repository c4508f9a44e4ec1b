"""Who may import whom, and that asking for help imports nothing heavy."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FRAMEWORKS = ("torch", "transformers", "mlx", "jax", "executorch", "numpy", "rich")
RUNS = 12


def modules_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(' '.join(sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return {name.split(".")[0] for name in done.stdout.split()[-5000:]}


HELP = """
import sys
sys.argv = ["pippin", *{arguments}]
from pippin.cli import main
try: main()
except SystemExit: pass
"""


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["train", "-h"], []])
def test_help_imports_nothing_heavy(arguments):
    heavy = modules_after(HELP.format(arguments=arguments)).intersection(FRAMEWORKS)
    assert heavy == set()


def test_planning_imports_no_framework():
    code = "import pippin.run, pippin.console, pippin.forecast"
    heavy = modules_after(code) & {"torch", "transformers", "mlx", "jax", "executorch"}
    assert heavy == set()


def test_help_answers_at_once():
    """Under four times a bare Python, the best of several, taken in turns."""
    bare = [sys.executable, "-c", "pass"]
    pippin = [sys.executable, "-c", HELP.format(arguments=["--help"])]
    times = [(_seconds(bare), _seconds(pippin)) for _ in range(RUNS)]
    best_bare, best_pippin = (min(column) for column in zip(*times, strict=True))
    assert best_pippin < 4 * best_bare


def _seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def test_layers():
    """The contracts in pyproject.toml: no arrow runs back up, frameworks stay in their folders."""
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
