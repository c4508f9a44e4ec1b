"""The plan's memory for training against the peak of trainings in processes of their own."""

import importlib.util
import itertools
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def load_bench():
    """benchmarks/bench_forecast.py, which is no package."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location(
            "bench_forecast", BENCHMARKS / "bench_forecast.py"
        )
        module = importlib.util.module_from_spec(spec)
        sys.modules["bench_forecast"] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARKS))
    return module


bench = load_bench()


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked", itertools.chain(*bench.SETS["cpu"]), ids=lambda run: run.name.replace(", ", "-")
)
def test_a_plan_holds(asked, tmp_path):
    found = bench.in_child("cpu", asked, tmp_path / "run")
    print(json.dumps(found))
    assert -0.03 <= bench.error(found) <= 0.12
