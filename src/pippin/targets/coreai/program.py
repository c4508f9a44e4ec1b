"""The decoder as an .aimodel: exported once a function, converted, saved."""

from pathlib import Path

from coreai_torch import TorchConverter, get_decomp_table

from pippin.targets.decoder import Decoder, Weights
from pippin.targets.exporting import INPUTS, OUTPUT, export
from pippin.targets.quiet import quiet

# `main` gives the last token's logits, what an app asks for; `score` those of every token.
MAIN, SCORE = "main", "score"


def save(weights: Weights, path: Path) -> None:
    """Write the .aimodel; its functions take 1 to `context` - 1 tokens and share the weights."""
    with quiet():
        converter = TorchConverter(mode=TorchConverter.Mode.RELEASE)
        for name, every in ((MAIN, False), (SCORE, True)):
            converter.add_exported_program(
                export(Decoder(weights, every), get_decomp_table()),
                input_names=INPUTS,
                output_names=[OUTPUT],
                entrypoint_name=name,
            )
        converter.to_coreai().save_asset(path)
