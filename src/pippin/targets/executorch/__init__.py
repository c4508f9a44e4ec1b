"""ExecuTorch with XNNPACK: a .pte for the CPUs of phones, checked in ExecuTorch's own runtime.

constraint.py   what the target can hold, asked before any work
folder.py       codes as XNNPACK holds them
layers.py       linears, embeddings, norms and rotations in forms that XNNPACK takes
parts.py        caches and quantized layers of the shared decoder
stretches.py    what XNNPACK gets, and the program around it
lowering.py     export, delegation, serialization
delegation.py   which operators a delegate took, of what share of the work
runtime.py      the .pte as a Scorer
recording.py    what a .pte hands from layer to layer while it runs
check.py        the .pte against PyTorch, layer by layer
stored.py       the codes in the .pte against the folder's
writing.py      the bundle
sharing.py      what the .pte stores twice, taken out
guide.py        the bundle's README
affine.py       for other delegates: codes as torchao writes them
delegated.py    their bundle; delegated_target.py is their entry, coreml/ mlx/ vulkan/ what differs
"""

from collections.abc import Iterator
from pathlib import Path

from pippin.engines import Scorer
from pippin.events import Event
from pippin.model.config import read_config
from pippin.recipe import Quantize
from pippin.targets import Bundle, Refusal
from pippin.targets.executorch.constraint import refuse_quantize, refuse_scales
from pippin.targets.families import refuse_family
from pippin.targets.native_log import without_harmless_lines


class ExecuTorch:
    """The target; its packages are imported when it writes or loads."""

    def refusal(self, quantize: Quantize, checkpoint: Path) -> Refusal | None:
        """The first reason against deploying such a model, as (message, hint); None for none."""
        tied = read_config(checkpoint).tied_embeddings
        reasons = [
            *refuse_family("executorch", checkpoint),
            *refuse_quantize(quantize, tied),
            *refuse_scales(quantize, checkpoint),
        ]
        return reasons[0] if reasons else None

    def write(self, bundle: Bundle) -> Iterator[Event]:
        """Make, describe and check the bundle. Raises what writing.write raises."""
        with without_harmless_lines():
            from pippin.targets.executorch import writing

        yield from writing.write(bundle)

    def load(self, folder: Path) -> Scorer:
        """The .pte in ExecuTorch's runtime. Raises ModelError for an incomplete bundle."""
        with without_harmless_lines():
            from pippin.targets.executorch import writing

            return writing.load(folder)


def make_target() -> ExecuTorch:
    """The target's entry in the table."""
    return ExecuTorch()
