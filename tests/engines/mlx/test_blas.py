"""Whoever imports MLX first on Linux lets OpenBLAS go before it: a reference BLAS is far slower."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.mlx]

CHILD = """
import sys
from pathlib import Path

from pippin.engines.mlx import blas

def preload():
    print("before" if "mlx.core" not in sys.modules else "after")

blas.preload = preload
{call}
assert "mlx.core" in sys.modules
"""
CALLS = {
    "a plan": "from pippin.engines.mlx.families import refusal; refusal(Path(sys.argv[1]))",
    "a model": "from pippin.engines import load_engine; load_engine('mlx', 'cpu')",
    "a check": "from pippin.check import Shapes; from pippin.engines.mlx.probes import probes; "
    "probes('cpu', Shapes())",
}


@pytest.mark.parametrize("name", CALLS)
def test_openblas_goes_first(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    program = CHILD.format(call=CALLS[name])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "before"
