"""Apple's chips, and machines that are not here: `pippin plan` answers for them as well."""

import functools
import math
import re
import tomllib
from dataclasses import dataclass, replace
from importlib import resources

from pippin.errors import UsageError
from pippin.machine import GIB, Accelerator, Machine, working_set


@dataclass(frozen=True, kw_only=True, slots=True)
class Chip:
    """One chip: memory sizes in GB, bandwidth in GB a second."""

    name: str
    memory: tuple[int, ...]
    bandwidth: int
    source: str


@functools.cache
def load_chips() -> dict[str, Chip]:
    """Every chip of chips.toml by its name, e.g. `m2-pro`."""
    tables = tomllib.loads(resources.files("pippin.machine").joinpath("chips.toml").read_text())
    return {
        name: Chip(
            name=name,
            memory=tuple(table["memory"]),
            bandwidth=table["bandwidth"],
            source=table["source"],
        )
        for name, table in tables.items()
    }


def parse_memory(text: str) -> int:
    """`16GB` as bytes, in powers of 1024 as memory is sold; UsageError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:GB|GiB|G)?", text.strip(), re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"--memory {text} is no size of memory", "write it like 16GB")
    return int(float(match[1]) * GIB)


@dataclass(frozen=True, kw_only=True, slots=True)
class Elsewhere:
    """A machine that is not here, by its memory, its device and perhaps its chip."""

    memory: str | None = None
    device: str | None = None
    chip: str | None = None

    def machine(self, here: Machine) -> Machine:
        """That machine; `here` where nothing was asked. Its speed is not known.

        Raises UsageError for a memory that its chip was never sold with.
        """
        if self.memory is None and self.device is None and self.chip is None:
            return here
        chip, device = self._chip(), self.device or ("mps" if self.chip else "cpu")
        if self.memory is None:
            raise UsageError("a machine that is not here needs its memory", "add --memory 16GB")
        if chip and device != "mps":
            raise UsageError(f"chip {chip.name} has no {device}", "use --device mps, or no --chip")
        total = parse_memory(self.memory)
        if chip and total not in [size * GIB for size in chip.memory]:
            sizes = ", ".join(f"{size}GB" for size in chip.memory)
            raise UsageError(f"no {chip.name} has {self.memory}", f"it was sold with {sizes}")
        return _imagined(here, total, device, chip)

    def _chip(self) -> Chip | None:
        if self.chip is None:
            return None
        chips = load_chips()
        if self.chip not in chips:
            raise UsageError(f"chip {self.chip} is not known", f"one of {', '.join(chips)}")
        return chips[self.chip]


def _imagined(here: Machine, total: int, device: str, chip: Chip | None) -> Machine:
    name = f"{chip.name}, {chip.bandwidth} GB/s" if chip else f"some {device} machine"
    shared = device == "mps"
    free = working_set(total) if shared else total
    accelerator = None
    if device != "cpu":
        accelerator = Accelerator(kind=device, name=name, memory_total=total, memory_available=free)
    return replace(
        here,
        chip=name,
        system="not this machine",
        memory_total=total if shared or device == "cpu" else here.memory_total,
        memory_available=free if shared or device == "cpu" else here.memory_available,
        shared_memory=shared,
        native_bfloat16=shared,
        compiles=False,
        gflops=math.nan,
        elsewhere=True,
        accelerator=accelerator,
        accelerated=here.engines,
    )
