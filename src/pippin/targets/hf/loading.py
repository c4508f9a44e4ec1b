"""The bundle as transformers loads it, its packed weights expanded."""

from pathlib import Path

import compressed_tensors  # noqa: F401  what transformers needs, missed here with its name
import torch
from transformers import AutoConfig, AutoModelForCausalLM

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


def loads_packed(folder: Path) -> bool:
    """Whether transformers can load linears that have no `weight` yet, as packed ones have not.

    Before it reads a file it asks the network for first values, and some set those of a `weight`.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with quiet(), torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    for module in network.modules():
        vars(module).pop("_is_hf_initialized", None)
        if isinstance(module, torch.nn.Linear) and module is not network.get_output_embeddings():
            del module.weight
    try:
        network.initialize_weights()
    except AttributeError:
        return False
    return True
