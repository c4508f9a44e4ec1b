"""Several processes that were launched together: the first runs the recipe, the others help it."""

import contextlib
import os
import signal
from collections.abc import Generator
from typing import Protocol, runtime_checkable

from pippin.errors import PippinError
from pippin.recipe import Model
from pippin.stages.loading import open_engine


@runtime_checkable
class Led(Protocol):
    """What some engines do besides: share the updates of a training among several processes.

    The first runs the recipe, the others `follow`. Each raises PippinError where another has ended.
    """

    def lead(self) -> None:
        """Find the others, before anything else is done."""
        ...

    def let_go(self, fault: str) -> None:
        """The run is over; `fault` says why it failed, or nothing."""
        ...

    def follow(self) -> None:
        """Take a share of the first one's updates until its run is over; nothing is written."""
        ...


def follow(model: Model) -> bool:
    """In any process but the first, share its updates until its run is over; whether it was one.

    A Ctrl-C reaches all of them, and is the first one's to answer.
    """
    engine = _shared(model)
    if engine is None or os.environ["MLX_RANK"] == "0":
        return False
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with _mortal():
        engine.follow()
    return True


@contextlib.contextmanager
def leading(model: Model) -> Generator[None]:
    """Inside, the other processes are there for this one, the first; then they are let go."""
    engine = _shared(model)
    if engine is None:
        yield
        return
    with _mortal():
        engine.lead()
    fault = "it ended early"
    try:
        yield
        fault = ""
    except PippinError as error:
        fault = error.message
        raise
    finally:
        engine.let_go(fault)


@contextlib.contextmanager
def _mortal() -> Generator[None]:
    """SIGTERM ends this process at once: Python would hear of it after the wait for the others."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _shared(model: Model) -> Led | None:
    """The engine, in a process that is one of several."""
    if model.engine != "mlx" or not os.environ.get("MLX_RANK"):
        return None
    engine = open_engine(model)
    assert isinstance(engine, Led)
    return engine
