"""The shared decoder as an exported program; its inputs are 32-bit, as Apple's formats are.

Shape letters: B batch (1), T tokens.
"""

from typing import Any

import torch
from torch import Tensor, nn

from pippin.targets.decoder import Decoder

INPUTS, OUTPUT = ("tokens", "input_pos"), "logits"


class _Int32(nn.Module):
    """The decoder behind 32-bit integers."""

    def __init__(self, decoder: Decoder):
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: Tensor, input_pos: Tensor) -> Tensor:
        """As Decoder.forward."""
        return self.decoder(tokens.long(), input_pos.long())


def export(decoder: Decoder, table: dict[Any, Any]) -> torch.export.ExportedProgram:
    """A graph that takes 1 to `context` - 1 tokens a call, decomposed by `table`."""
    example = (torch.zeros((1, 3), dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    # A call that fills the whole cache would be another program: its shapes are equal to others.
    length = torch.export.Dim("length", min=1, max=decoder.weights.shape.context - 1)
    with torch.no_grad():
        program = torch.export.export(
            _Int32(decoder), example, dynamic_shapes=({1: length}, None), strict=False
        )
        return program.run_decompositions(table)
