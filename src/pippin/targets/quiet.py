"""Holds back what export libraries tell their own authors; errors pass."""

import contextlib
import logging
import sys
import warnings
from collections.abc import Generator

from pippin.targets.native_log import without_harmless_lines

_LOGGERS = ("coremltools", "executorch.backends.mlx", "torch.export", "torchao")


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """No warnings, no progress of their own, and errors alone of their logs; stdout stays ours."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with without_harmless_lines(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.redirect_stdout(sys.stderr):
                yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
