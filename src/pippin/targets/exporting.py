"""The shared decoder as an exported program; its inputs are 32-bit, as Apple's formats are.

Shape letters: B batch (1), T tokens, N wanted positions.
"""

from typing import Any

import torch
from torch import Tensor, nn

from pippin.targets.decoder import Decoder

INPUTS, WANTED, OUTPUT = ("tokens", "input_pos"), "wanted", "logits"


class _Int32(nn.Module):
    """The decoder behind 32-bit integers."""

    def __init__(self, decoder: Decoder):
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: Tensor, input_pos: Tensor, wanted: Tensor | None = None) -> Tensor:
        """As Decoder.forward."""
        positions_N = None if wanted is None else wanted.long()
        return self.decoder(tokens.long(), input_pos.long(), positions_N)


def export(decoder: Decoder, table: dict[Any, Any], wanted: bool) -> torch.export.ExportedProgram:
    """A graph that takes 1 to `context` - 1 tokens a call, decomposed by `table`.

    With `wanted` its third input names those of them whose logits are asked for.
    """
    # A call that fills the whole cache would be another program: its shapes are equal to others.
    longest = decoder.weights.shape.context - 1
    length, count = (torch.export.Dim(name, min=1, max=longest) for name in ("length", "count"))
    inputs = (torch.zeros((1, 3), dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    example = (*inputs, torch.zeros(2, dtype=torch.int32)) if wanted else inputs
    shapes = ({1: length}, None, {0: count} if wanted else None)
    with torch.no_grad():
        program = torch.export.export(
            _Int32(decoder), example, dynamic_shapes=shapes[: len(example)], strict=False
        )
        return program.run_decompositions(table)
