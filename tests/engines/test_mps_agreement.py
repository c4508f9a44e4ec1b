"""The rules against PyTorch's own expectations of MPS, over a part of its operator database."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.torch, pytest.mark.slow]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PARTS = 6


@pytest.fixture(scope="module")
def bench():
    """The benchmark that judges all of it."""
    pytest.importorskip("expecttest")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        spec = importlib.util.spec_from_file_location("rules", BENCHMARKS / "bench_mps_rules.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
        sys.modules.pop("common", None)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.filterwarnings("ignore")
def test_what_differs_is_explained(bench, part):
    judged = list(bench.judge_all(torch.float32, slice(part, None, PARTS)))
    differ = {name: (wanted, seen) for name, wanted, found, seen in judged if wanted != found}
    assert len(judged) > 50
    assert {name: why for name, why in differ.items() if name not in bench.EXPLAINED} == {}
