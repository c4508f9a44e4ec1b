"""Quantized folders of tiny models, each under its test's own folder."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.targets.tiny_quantized import Choose, usual, write_folder


@pytest.fixture
def quantized(tmp_path: Path) -> Callable[..., Path]:
    """Makes quantized folders under the test's own folder."""

    def make(kind: str = "llama", choose: Choose = usual) -> Path:
        folder = tmp_path / f"{kind}-quantized"
        folder.mkdir()
        return write_folder(folder, kind, choose)

    return make
