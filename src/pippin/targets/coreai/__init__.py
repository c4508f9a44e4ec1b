"""Core AI, Apple's runtime from iOS and macOS 27 on: an .aimodel with the KV cache as state.

parts.py        matrices as codes and scales
program.py      export, conversion, the asset
runtime.py      the .aimodel as a Scorer
writing.py      the bundle
guide.py        the bundle's README
"""

from collections.abc import Iterator
from pathlib import Path

from pippin.engines import Scorer
from pippin.events import Event
from pippin.quantizers import Grid
from pippin.recipe import Quantize
from pippin.targets import Bundle, Refusal
from pippin.targets.families import refuse_family
from pippin.targets.quiet import quiet


class CoreAi:
    """The target; its packages are imported when it writes or loads."""

    def refusal(self, quantize: Quantize, checkpoint: Path) -> Refusal | None:
        """The first reason against deploying such a model, as (message, hint); None for none."""
        return next(refuse_family("coreai", checkpoint), None)

    def stored_bits(self, grid: Grid, inputs: int) -> float:
        """Codes have 4 or 8 bits, scales and zero points are float32."""
        shared = inputs if grid.per_channel else grid.group_size
        return held_bits(grid.bits) + (32 if grid.symmetric else 64) / shared

    def write(self, bundle: Bundle) -> Iterator[Event]:
        """Make, describe and check the bundle. Raises what writing.write raises."""
        with quiet():
            from pippin.targets.coreai import writing

        yield from writing.write(bundle)

    def load(self, folder: Path) -> Scorer:
        """The .aimodel in Core AI's runtime. Raises ModelError for an incomplete bundle."""
        with quiet():
            from pippin.targets.coreai import writing

        return writing.load(folder)


def held_bits(bits: int) -> int:
    """The width that holds codes of so many bits."""
    return 4 if bits <= 4 else 8


def make_target() -> CoreAi:
    """The target's entry in the table."""
    return CoreAi()
