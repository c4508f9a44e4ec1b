"""ExecuTorch with its Core ML delegate: a .pte whose program Core ML runs, from iOS 18 on.

parts.py        the parts of the Core ML target, over codes as torchao writes them
runtime.py      the package inside the .pte as a Scorer
delegate.py     lowering, and what the bundle says
"""

from collections.abc import Iterator
from pathlib import Path

from pippin.engines import Scorer
from pippin.events import Event
from pippin.recipe import Quantize
from pippin.targets import Bundle, Refusal
from pippin.targets.coreml import BITS
from pippin.targets.families import refuse_family
from pippin.targets.grids import refuse_grids
from pippin.targets.quiet import quiet


class ExecuTorchCoreMl:
    """The target; its packages are imported when it writes or loads."""

    def refusal(self, quantize: Quantize, checkpoint: Path) -> Refusal | None:
        """The first reason against deploying such a model, as (message, hint); None for none."""
        reasons = [
            *refuse_family("executorch-coreml", checkpoint, masked=True),
            *refuse_grids("executorch-coreml", quantize, BITS),
        ]
        return reasons[0] if reasons else None

    def write(self, bundle: Bundle) -> Iterator[Event]:
        """Make, describe and check the bundle. Raises what delegated.write raises."""
        with quiet():
            from pippin.targets.executorch import delegated
            from pippin.targets.executorch.coreml.delegate import delegate

        yield from delegated.write(delegate(), bundle)

    def load(self, folder: Path) -> Scorer:
        """The program inside the .pte in numpy: not Core ML itself.

        Raises ModelError for an incomplete bundle.
        """
        with quiet():
            from pippin.targets.executorch import delegated
            from pippin.targets.executorch.coreml.delegate import delegate

        return delegated.load(delegate(), folder)


def make_target() -> ExecuTorchCoreMl:
    """The target's entry in the table."""
    return ExecuTorchCoreMl()
