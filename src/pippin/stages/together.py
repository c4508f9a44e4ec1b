"""Several processes that were launched together: the first runs the recipe, the others help it."""

import contextlib
import os
import signal
from collections.abc import Generator
from typing import Protocol, runtime_checkable

from pippin.errors import PippinError, UsageError
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

    def follow(self) -> str:
        """Take a share of the first one's updates until its run is over; nothing is written.

        Returns what `let_go` told.
        """
        ...


def alone(what: str) -> None:
    """Raise UsageError where `mlx.launch` started several processes for what one does.

    The first says so for all: the others leave as if all was well, since their launcher would stop
    it before it has spoken.
    """
    number = os.environ.get("MLX_RANK")
    if number not in (None, "", "0"):
        raise SystemExit(0)
    if number:
        raise UsageError(
            f"{what} is work for one process, and mlx.launch starts several",
            "start pippin without mlx.launch",
        )


def follow(model: Model) -> str | None:
    """In any process but the first, share its updates until its run is over; None in the first.

    Returns why the run failed, or nothing. A Ctrl-C reaches all of them, and is the first one's to
    answer.
    """
    engine = _shared(model)
    if engine is None or os.environ["MLX_RANK"] == "0":
        return None
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with _mortal():
        return engine.follow()


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
    if model.engine != "mlx":
        alone(f"engine {model.engine}")
    if not os.environ.get("MLX_RANK"):
        return None
    engine = open_engine(model)
    assert isinstance(engine, Led)
    return engine
