"""Who may import whom, and that asking for help imports nothing heavy."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FRAMEWORKS = ("torch", "transformers", "mlx", "jax", "executorch", "numpy", "rich")
MOST = 60  # modules for a page of help: the parser's, no command's own


def modules_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules, file=sys.stderr)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stderr.split())


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
    bare = modules_after("pass")
    assert len(modules_after(HELP.format(arguments=["--help"])) - bare) < MOST


def test_layers():
    """The contracts in pyproject.toml: no arrow runs back up, frameworks stay in their folders."""
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
