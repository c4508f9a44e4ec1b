"""The bundle as transformers loads it, its packed weights expanded."""

from pathlib import Path

import compressed_tensors  # noqa: F401  what transformers needs, missed here with its name
import torch
from transformers import AutoModelForCausalLM

from pippin.engines import Scorer
from pippin.engines.torch.engine import TorchModel
from pippin.targets.bundle import read_description
from pippin.targets.quiet import quiet


def load(folder: Path) -> Scorer:
    """The bundle in transformers. Raises ModelError where a file is not as it was written."""
    read_description(folder)
    return open_folder(folder)


def open_folder(folder: Path) -> Scorer:
    """The folder in transformers, in float32."""
    with quiet():
        network = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        )
        # The first pass expands what is packed.
        network.eval().requires_grad_(False)(torch.zeros((1, 1), dtype=torch.long))
    return TorchModel(network, folder)
