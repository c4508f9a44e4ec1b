"""The decoder as an .aimodel: exported, converted, saved."""

import errno
import os
import shutil
from pathlib import Path

from coreai_torch import TorchConverter, get_decomp_table

from pippin.targets.decoder import Decoder, Weights
from pippin.targets.exporting import INPUTS, OUTPUT, WANTED, export
from pippin.targets.quiet import quiet

MAIN = "main"


def save(weights: Weights, path: Path) -> None:
    """Write the .aimodel; its function takes 1 to `context` - 1 tokens and the wanted positions.

    One function, since exporting takes most of the time: an app wants the last token's logits, a
    comparison those of all. Raises OSError where the disk is full.
    """
    # Its compiler ends the process, without a word to us, where it cannot write.
    if shutil.disk_usage(path.parent).free < sum(part.nbytes for part in weights.buffers()):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    with quiet():
        program = export(Decoder(weights, every=True), get_decomp_table(), wanted=True)
        converter = TorchConverter(mode=TorchConverter.Mode.RELEASE)
        converter.add_exported_program(
            program,
            input_names=(*INPUTS, WANTED),
            output_names=[OUTPUT],
            entrypoint_name=MAIN,
        )
        converter.to_coreai().save_asset(path)
