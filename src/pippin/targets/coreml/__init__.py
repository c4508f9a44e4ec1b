"""Core ML from iOS 18 on: an .mlpackage with the KV cache as state and codes of 4 or 8 bits.

parts.py        matrices with notes of their codes, a norm that float16 holds
program.py      export, conversion, the package
mil.py          Core ML's operators in numpy
runtime.py      the package as a Scorer
writing.py      the bundle
guide.py        the bundle's README
"""

from collections.abc import Iterator
from pathlib import Path

from pippin.engines import Scorer
from pippin.events import Event
from pippin.recipe import Quantize
from pippin.targets import Bundle, Refusal
from pippin.targets.families import refuse_family
from pippin.targets.grids import refuse_grids
from pippin.targets.quiet import quiet

BITS = (4, 8)


class CoreMl:
    """The target; its packages are imported when it writes or loads."""

    def refusal(self, quantize: Quantize, checkpoint: Path) -> Refusal | None:
        """The first reason against deploying such a model, as (message, hint); None for none."""
        reasons = [
            *refuse_family("coreml", checkpoint),
            *refuse_grids("coreml", quantize, BITS),
        ]
        return reasons[0] if reasons else None

    def write(self, bundle: Bundle) -> Iterator[Event]:
        """Make, describe and check the bundle. Raises what writing.write raises."""
        with quiet():
            from pippin.targets.coreml import writing

        yield from writing.write(bundle)

    def load(self, folder: Path) -> Scorer:
        """The package's own program and weights in numpy: not Core ML itself.

        Raises ModelError for an incomplete bundle.
        """
        with quiet():
            from pippin.targets.coreml import writing

        return writing.load(folder)


def make_target() -> CoreMl:
    """The target's entry in the table."""
    return CoreMl()
