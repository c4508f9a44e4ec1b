"""Ctrl-C and SIGTERM while a stage has work in its hands: noted first, obeyed at a good moment."""

import contextlib
import signal
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from types import FrameType

from pippin.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE = 1.0  # seconds in which a second Ctrl-C counts as the same one


@dataclass
class Watch:
    """`asked` turns true with the first signal. A later one stops at once."""

    asked: bool = False
    at: float = 0.0

    def note(self, number: int, frame: FrameType | None) -> None:
        """The signals' handler."""
        now = time.monotonic()
        if self.asked and now - self.at > GRACE:
            raise Interrupted(
                "stopped at once, the last updates are not saved",
                "run the same command again: it goes on from the last checkpoint",
            )
        if not self.asked:
            self.asked, self.at = True, now


@contextlib.contextmanager
def watching() -> Generator[Watch]:
    """Note the signals inside the block instead of raising; threads other than the main see none.

    Whatever is being written when a second signal stops the block is written whole or not at all.
    """
    watch = Watch()
    if threading.current_thread() is not threading.main_thread():
        yield watch
        return
    before = {number: signal.signal(number, watch.note) for number in SIGNALS}
    try:
        yield watch
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
