"""mlx-lm's code for an architecture compared with transformers' in float32, once per config.

A model of the same config with few layers, a small vocabulary and random weights goes through both.
What differs would compute other numbers without a word (a rope base that is not read, an attention
window that is left out), so it is refused, or limited to the lengths at which the two agree.

Shape letters: B 1, T tokens.
"""

import contextlib
import functools
import json
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
from pippin.model.config import read_raw, shrunk, without_quantization, write_raw
from pippin.quiet import quiet_imports

TOKENS = 24
VOCABULARY = 128
WINDOW = 8
TOLERANCE = 1e-3  # of the largest logit; where the code agrees it is 2e-6, a wrong rope gives 1
LABELS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")
FAULTS = (ValueError, KeyError, TypeError, RuntimeError, AttributeError)


def check(folder: Path) -> int | None:
    """The longest row that is computed as transformers computes it; None for any length.

    Raises ModelError where the two differ, or cannot be compared.
    """
    raw = without_quantization(read_raw(folder))
    if "text_config" in raw:  # whose sizes `shrunk` does not know
        raise ModelError(
            f"{folder}: the MLX engine takes text models, {raw.get('model_type')} has other towers",
            "set model.engine = torch",
        )
    plain = {key: value for key, value in raw.items() if key not in LABELS}
    return _limit(json.dumps(plain, sort_keys=True))


@functools.cache
def _limit(config: str) -> int | None:
    raw = json.loads(config)
    window = raw.get("sliding_window") if raw.get("use_sliding_window", True) else None
    if window and _difference(raw | {"sliding_window": WINDOW}, TOKENS) <= TOLERANCE:
        return None
    difference = _difference(raw, min(TOKENS, window or TOKENS))
    if difference > TOLERANCE:
        raise ModelError(
            f"mlx-lm computes {raw.get('model_type')} with this config.json differently than "
            f"transformers: logits off by {difference:.1%} of the largest",
            "set model.engine = torch",
        )
    return window


def _difference(raw: dict[str, Any], tokens: int) -> float:
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
