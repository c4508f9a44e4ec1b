"""A folder for transformers and vLLM: compressed-tensors where it holds the codes, else dense."""

from collections.abc import Iterator
from pathlib import Path

from pippin.engines import Scorer
from pippin.events import Event
from pippin.quantizers import Grid
from pippin.recipe import Quantize
from pippin.targets import Bundle, Refusal
from pippin.targets.quiet import quiet

PACKED_BITS = (4, 8)


class HuggingFace:
    """The target; its packages are imported when it writes or loads."""

    def refusal(self, quantize: Quantize, checkpoint: Path) -> Refusal | None:
        """None: what compressed-tensors cannot hold is written dense, and a notice says so."""
        return None

    def stored_bits(self, grid: Grid, inputs: int) -> float:
        """What compressed-tensors does not hold is dense."""
        packed = grid.symmetric and grid.bits in PACKED_BITS
        return grid.bits + 16 / grid.group_size if packed else 16

    def write(self, bundle: Bundle) -> Iterator[Event]:
        """Make, describe and check the bundle. Raises what writing.write raises."""
        with quiet():
            from pippin.targets.hf import writing

        yield from writing.write(bundle)

    def load(self, folder: Path) -> Scorer:
        """The folder in transformers. Raises ModelError for an incomplete bundle."""
        with quiet():
            from pippin.targets.hf import loading

        return loading.load(folder)


def make_target() -> HuggingFace:
    """The target's entry in the table."""
    return HuggingFace()
