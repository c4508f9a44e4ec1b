"""Every engine that is installed, under the same tests."""

import importlib.util

import pytest

from pippin.engines import ENGINES, load_engine


def _parameter(name: str):
    missing = importlib.util.find_spec(name) is None
    marks = [getattr(pytest.mark, name), pytest.mark.skipif(missing, reason=f"{name} is missing")]
    return pytest.param(name, marks=marks)


@pytest.fixture(scope="session", params=[_parameter(name) for name in ENGINES])
def engine(request: pytest.FixtureRequest):
    engine = load_engine(request.param, "cpu")
    if request.param == "torch":
        import torch

        torch.set_num_threads(1)
    return engine
