"""The decoder as an .aimodel: exported once a function, converted, saved.

Shape letters: B batch (1), T tokens.
"""

from pathlib import Path

import torch
from coreai_torch import TorchConverter, get_decomp_table
from torch import Tensor, nn

from pippin.targets.decoder import Decoder, Weights

# `main` gives the last token's logits, what an app asks for; `score` those of every token.
MAIN, SCORE = "main", "score"
INPUTS, OUTPUT = ("tokens", "input_pos"), "logits"


class _Int32(nn.Module):
    """The decoder behind 32-bit integers, the widest that Core AI has."""

    def __init__(self, decoder: Decoder):
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: Tensor, input_pos: Tensor) -> Tensor:
        """As Decoder.forward."""
        return self.decoder(tokens.long(), input_pos.long())


def save(weights: Weights, path: Path) -> None:
    """Write the .aimodel; functions take 1 to `context` - 1 tokens a call and share the weights."""
    converter = TorchConverter(mode=TorchConverter.Mode.RELEASE)
    for name, every in ((MAIN, False), (SCORE, True)):
        converter.add_exported_program(
            _export(Decoder(weights, every), weights.shape.context),
            input_names=INPUTS,
            output_names=[OUTPUT],
            entrypoint_name=name,
        )
    converter.to_coreai().save_asset(path)


def _export(decoder: Decoder, context: int) -> torch.export.ExportedProgram:
    example = (torch.zeros((1, 3), dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    # A call that fills the whole cache would be another program: its shapes are equal to others.
    length = torch.export.Dim("length", min=1, max=context - 1)
    with torch.no_grad():
        program = torch.export.export(
            _Int32(decoder), example, dynamic_shapes=({1: length}, None), strict=False
        )
        return program.run_decompositions(get_decomp_table())
