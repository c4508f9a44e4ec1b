"""GGUF for llama.cpp and what is built on it: codes moved bit for bit, re-read before it is done.

constraint.py   what the format can hold, asked before any work
blocks.py       codes and scales as GGML's blocks
superblocks.py  codes and scales of scales as its K types
tensors.py      names and row orders of the architectures
metadata.py     the architecture's figures
vocabulary.py   the tokenizer
writing.py      the bundle
reading.py      the file back as a model folder, and its comparison
llama_cpp.py    the file in llama.cpp, where that is installed
ollama.py       Ollama's Modelfile
"""

from collections.abc import Iterator
from pathlib import Path

from pippin.engines import Scorer
from pippin.events import Event
from pippin.quantizers import Grid
from pippin.recipe import Quantize
from pippin.targets import Bundle, Refusal
from pippin.targets.gguf.constraint import (
    refuse_model,
    refuse_quantize,
    refuse_scales,
    refuse_tokenizer,
)


class Gguf:
    """The target; its packages are imported when it writes or loads."""

    def refusal(self, quantize: Quantize, checkpoint: Path) -> Refusal | None:
        """The first reason against deploying such a model, as (message, hint); None for none."""
        reasons = [
            *refuse_model(checkpoint),
            *refuse_quantize(quantize),
            *refuse_scales(checkpoint),
            *refuse_tokenizer(checkpoint),
        ]
        return reasons[0] if reasons else None

    def stored_bits(self, grid: Grid, inputs: int) -> float:
        """Of the type that holds such codes: 2 and 3 bits lie in blocks of 4-bit codes."""
        from pippin.targets.gguf.blocks import block_type, type_bits

        return type_bits(block_type(grid.bits, grid.symmetric, grid.nested))

    def write(self, bundle: Bundle) -> Iterator[Event]:
        """Make, describe and check the bundle. Raises what writing.write raises."""
        from pippin.targets.gguf import writing

        yield from writing.write(bundle)

    def load(self, folder: Path) -> Scorer:
        """The file in llama.cpp; in PyTorch, read back, where that was not installed.

        Raises ModelError for an incomplete bundle.
        """
        from pippin.targets.gguf import reading

        return reading.load(folder)


def make_target() -> Gguf:
    """The target's entry in the table."""
    return Gguf()
