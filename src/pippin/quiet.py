"""Keeps libraries quiet while they are imported: what they report then is not about the run."""

import contextlib
import logging
from collections.abc import Generator


@contextlib.contextmanager
def quiet_imports() -> Generator[None]:
    """transformers imports torchao where it is installed, which reports every kernel it lacks."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
