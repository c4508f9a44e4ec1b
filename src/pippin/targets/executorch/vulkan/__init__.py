"""ExecuTorch with its Vulkan delegate: a .pte for the GPUs of Android phones.

parts.py        linears, norms and attention in the forms that Vulkan has shaders for
delegate.py     lowering, and what the bundle says
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


class ExecuTorchVulkan:
    """The target; its packages are imported when it writes."""

    def refusal(self, quantize: Quantize, checkpoint: Path) -> Refusal | None:
        """The first reason against deploying such a model, as (message, hint); None for none."""
        reasons = [
            *refuse_family("executorch-vulkan", checkpoint),
            *refuse_grids("executorch-vulkan", quantize, BITS),
        ]
        if quantize.bits == 8:
            reasons.append(
                (
                    "executorch-vulkan: Vulkan multiplies 4-bit codes; 8-bit ones it would expand "
                    "at every token",
                    "set quantize.bits = 4",
                )
            )
        return reasons[0] if reasons else None

    def write(self, bundle: Bundle) -> Iterator[Event]:
        """Make, describe and check the bundle. Raises what delegated.write raises."""
        with quiet():
            from pippin.targets.executorch import delegated
            from pippin.targets.executorch.vulkan.delegate import delegate

        yield from delegated.write(delegate(), bundle)

    def load(self, folder: Path) -> Scorer:
        """Raises PippinError: nothing here runs the file."""
        with quiet():
            from pippin.targets.executorch import delegated
            from pippin.targets.executorch.vulkan.delegate import delegate

        return delegated.load(delegate(), folder)


def make_target() -> ExecuTorchVulkan:
    """The target's entry in the table."""
    return ExecuTorchVulkan()
