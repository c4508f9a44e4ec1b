"""transformers' numbers for a small random model, and how far mlx-lm's are from them.

Shape letters: B 1, T tokens.
"""

import contextlib
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from pippin.engines.mlx.load import load_network
from pippin.errors import ModelError
from pippin.model.config import shrunk, write_raw
from pippin.quiet import quiet_imports

VOCABULARY = 128
FAULTS = (ValueError, KeyError, TypeError, RuntimeError, AttributeError)


def difference(raw: dict[str, Any], tokens: int) -> float:
    """The largest difference of a logit, as a share of the largest logit."""
    tokens_BT = np.random.default_rng(0).integers(3, VOCABULARY, (1, tokens)).astype(np.int32)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        try:
            wanted = _reference(shrunk(raw, VOCABULARY), tokens_BT, folder)
            with mx.stream(mx.cpu):  # a GPU may round float32: the code is compared, not the device
                logits = load_network(folder, mx.float32)(mx.array(tokens_BT))
                mx.eval(logits)
        except (*FAULTS, ModelError) as error:
            raise ModelError(
                f"MLX's numbers for {raw.get('model_type')} cannot be compared with those of "
                f"transformers: {error}".replace(f"{folder}: ", ""),
                "set model.engine = torch",
            ) from error
    ours = np.array(logits.astype(mx.float32))
    return float(np.abs(ours - wanted).max() / np.abs(wanted).max())


def _reference(small: dict[str, Any], tokens_BT: NDArray[Any], folder: Path) -> NDArray[Any]:
    """transformers' logits of a random model, which is left in the folder."""
    with quiet_imports(), _no_bars():
        write_raw(folder, small)
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            for parameter in network.parameters():
                if parameter.dim() == 1:
                    parameter.uniform_(0.5, 1.5)
                else:  # attention must be sharp, or positions would not matter
                    parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
            network.save_pretrained(folder)
            return network.eval()(torch.from_numpy(tokens_BT).long()).logits.numpy()


@contextlib.contextmanager
def _no_bars() -> Generator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
