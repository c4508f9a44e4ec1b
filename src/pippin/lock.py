"""One run at a time in a run's folder: a lock that the kernel lets go of when its process dies."""

import contextlib
import fcntl
import os
from collections.abc import Generator
from pathlib import Path

from pippin.disk import disk_errors
from pippin.errors import PippinError


@contextlib.contextmanager
def locked(folder: Path) -> Generator[None]:
    """Hold `<folder>/.lock`; it names its process. Raises PippinError while another run holds it.

    The lock is the kernel's (flock), so one left behind by a killed run holds nobody up.
    """
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _take(handle, folder)
        yield
    finally:
        os.close(handle)


def _take(handle: int, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(handle, 32).decode(errors="replace").strip()
        raise PippinError(
            f"{folder} is in use by another run, process {owner or 'unknown'}",
            "wait for it, or give this recipe another `out`",
        ) from None
    os.truncate(handle, 0)
    os.write(handle, f"{os.getpid()}\n".encode())
