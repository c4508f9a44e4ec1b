"""Stops training, its work saved, before the machine swaps: no allocator sees the whole of it."""

from pippin.errors import PippinError
from pippin.figures import bytes_text, share_text
from pippin.machine import memory

FLOOR = 0.02  # of the machine's memory, caches that the system would give back counted as free


def scarcity() -> str | None:
    """What is left in words, where it is less than the floor."""
    total, available = memory()
    if available >= FLOOR * total:
        return None
    return f"{bytes_text(available)} of memory are left, {share_text(available / total)} of all"


def out_of_memory(left: str, step: int, total: int) -> PippinError:
    """The error that ends a training with its checkpoint written."""
    return PippinError(
        f"stopped after update {step} of {total}, a checkpoint is written: {left}",
        "close other programs and run the same command again; or lower train.batch_rows, or set "
        "train.gradient_checkpointing, with --redo train",
    )
