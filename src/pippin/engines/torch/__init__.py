"""The engine on PyTorch and transformers: any causal language model, on cpu, cuda or mps."""

import contextlib
import logging
from collections.abc import Generator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pippin.engines.torch.engine import TorchEngine


def make_engine(device: str = "auto", remote_code: bool = False) -> "TorchEngine":
    """The engine on `auto`, `cpu`, `cuda` or `mps`; UsageError where that device is not there.

    `remote_code` runs the modelling code in a model's folder where its config names some.
    """
    with _no_import_chatter():
        from pippin.engines.torch.device import pick_device
        from pippin.engines.torch.engine import TorchEngine
    return TorchEngine(pick_device(device), remote_code)


@contextlib.contextmanager
def _no_import_chatter() -> Generator[None]:
    """transformers imports torchao where it is installed, which reports every kernel it lacks."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
