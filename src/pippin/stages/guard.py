"""Stops training, its work saved, before the machine swaps: no allocator sees the whole of it.

The plan's figure for training is replaced by what its first updates measured; from then on the
guard knows what the next one will take besides what is held between updates.
"""

from dataclasses import dataclass

from pippin.engines import DriverMemory, Engine
from pippin.errors import PippinError
from pippin.figures import bytes_text, share_text
from pippin.machine import footprint, memory

FLOOR = 0.02  # of the machine's memory, caches that the system would give back counted as free
# Updates after which the peak was seen: the optimizer's moments are there in the second.
SETTLED = 3


@dataclass(kw_only=True, slots=True)
class Guard:
    """Watches the memory of one training.

    `planned` and `before` are bytes: the plan's peak, where there was one, and the engine's peak
    when training began. `peak` is measured after the first updates.
    """

    engine: Engine
    planned: int | None
    before: int
    peak: int | None = None

    def settle(self) -> str | None:
        """Measure the peak; how it compares with the plan, in words.

        None where an earlier stage of this process peaked higher: it hides this one's.
        """
        peak = self.engine.peak_memory()
        if peak <= self.before:
            return None
        self.peak = peak
        measured = f"memory peaked at {bytes_text(peak)} in the first {SETTLED} updates"
        if self.planned is None:
            return measured
        error = peak / self.planned - 1
        side = "above" if error > 0 else "below"
        return (
            f"{measured}, {share_text(abs(error))} {side} the plan's {bytes_text(self.planned)}: "
            "the guard goes by what was measured"
        )

    def scarcity(self) -> str | None:
        """What is short, in words; None where there is enough for the next update."""
        total, available = memory()
        if available < FLOOR * total:
            share = share_text(available / total)
            return f"{bytes_text(available)} of memory are left, {share} of all"
        held = footprint()
        if held > (1 - FLOOR) * total:
            return f"this process holds {bytes_text(held)}, swapped and compressed memory counted"
        return self._driver() or self._next(held, available)

    def _driver(self) -> str | None:
        """What the GPU's driver has given, where that is nearly all it recommends to take."""
        if not isinstance(self.engine, DriverMemory):
            return None
        given, recommended = self.engine.driver_memory()
        if given <= (1 - FLOOR) * recommended:
            return None
        return (
            f"the GPU's driver has given {bytes_text(given)} of the {bytes_text(recommended)} "
            "that it recommends to take"
        )

    def _next(self, held: int, available: int) -> str | None:
        """What an update takes for a while, on a CPU: there the peak is the process's."""
        if self.peak is None or not self.engine.device().startswith("cpu"):
            return None
        more = self.peak - held
        if more <= available:
            return None
        return f"the next update takes {bytes_text(more)} more, {bytes_text(available)} are left"


def out_of_memory(left: str, step: int, total: int) -> PippinError:
    """The error that ends a training with its checkpoint written."""
    return PippinError(
        f"stopped after update {step} of {total}, a checkpoint is written: {left}",
        "close other programs and run the same command again; or lower train.batch_rows, or set "
        "train.gradient_checkpointing, with --redo train",
    )
