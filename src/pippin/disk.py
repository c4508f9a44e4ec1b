"""Folders that appear whole or not at all, whatever happens in between.

Next to `name` live `.name.partial` (being written) and `.name.old` (being replaced). A kill at any
moment leaves the old folder or the new one; `recover` puts it in its place and clears the rest.
"""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Generator
from pathlib import Path

from pippin.errors import PippinError

FULL = (errno.ENOSPC, errno.EDQUOT)
CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS)
IN_THE_WAY = (errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP)


@contextlib.contextmanager
def whole(folder: Path) -> Generator[Path]:
    """A temporary folder that replaces `folder` when the block ends well, and vanishes otherwise.

    Raises PippinError where the disk is full or closed to us, or another pippin writes here.
    """
    folder = folder.resolve()  # a link to another disk stays a link to that disk
    partial, old = _partial(folder), _old(folder)
    with disk_errors(folder):
        recover(folder)
        partial.mkdir(parents=True, exist_ok=_busy(partial))
        with locked(partial):
            try:
                yield partial
                sync(partial)
                _swap(partial, folder)
            except BaseException:
                if old.exists() and not folder.exists():
                    old.rename(folder)
                discard(partial)
                raise


def recover(folder: Path) -> None:
    """Finish a replacement that was cut off, and clear what a killed writer left behind."""
    folder = folder.resolve()
    partial, old = _partial(folder), _old(folder)
    if _busy(partial):
        return
    if old.exists() and not folder.exists():
        # Cut off between the two renames: the new folder was complete and on the disk by then.
        (partial if partial.exists() else old).rename(folder)
    discard(old)
    discard(partial)


def discard(path: Path) -> None:
    """Remove one of our own temporary folders, as far as the disk lets us."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def retire(folder: Path) -> None:
    """Remove a complete folder; a kill in between leaves all of it or nothing under its name."""
    if folder.exists():
        folder = folder.resolve()
        discard(_partial(folder))
        folder.rename(_partial(folder))
        discard(_partial(folder))


@contextlib.contextmanager
def locked(folder: Path) -> Generator[None]:
    """Hold `folder` against every other process; the lock dies with the process.

    Raises PippinError where another holds it. File systems without locks go unguarded.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        if not _lock(handle):
            raise PippinError(
                f"another pippin is writing {folder}",
                "wait for it to end, or give this run another `out`",
            )
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def disk_errors(path: Path) -> Generator[None]:
    """Turn what a disk can refuse into an error for people."""
    try:
        yield
    except OSError as error:
        refusal = _refusal(error, path)
        if refusal is None:
            raise
        raise PippinError(*refusal) from error


def sync(folder: Path) -> None:
    """Bring every file and folder in `folder`, and itself, to the disk for good."""
    for path in sorted(folder.rglob("*")):
        if not path.is_symlink():
            sync_path(path)
    sync_path(folder)


def sync_path(path: Path) -> None:
    """Bring one file, or the names in one folder, to the disk for good."""
    handle = os.open(path, os.O_RDONLY)
    try:
        _flush(handle)
    except OSError as error:
        # Some network file systems cannot flush a folder; its files are flushed all the same.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(handle)


def _swap(partial: Path, folder: Path) -> None:
    old = _old(folder)
    discard(old)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    sync_path(folder.parent)
    discard(old)


def _flush(handle: int) -> None:
    full = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: fsync alone stops at the drive's cache
    if full is not None:
        with contextlib.suppress(OSError):
            fcntl.fcntl(handle, full)
            return
    os.fsync(handle)


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _busy(partial: Path) -> bool:
    if not partial.is_dir():
        return False
    handle = os.open(partial, os.O_RDONLY)
    try:
        return not _lock(handle)
    finally:
        os.close(handle)


def _refusal(error: OSError, path: Path) -> tuple[str, str] | None:
    place = error.filename or path
    if error.errno in FULL:
        return (
            f"the disk of {path} is full",
            "free some space, or choose another `out`; nothing finished was lost",
        )
    if error.errno == errno.EFBIG:
        return (
            f"the disk of {path} takes no file that large",
            "choose an `out` on another disk; nothing finished was lost",
        )
    if error.errno in CLOSED:
        hint = "look at its permissions, or choose an `out` folder that you may write to"
        return f"no permission for {place}", hint
    if error.errno in IN_THE_WAY:
        return f"{place} is in the way", "move it away, or choose another `out`"
    if error.errno == errno.EIO:
        return f"the disk of {path} fails ({error.strerror})", "choose an `out` on another disk"
    return None


def _partial(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.partial")


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")
