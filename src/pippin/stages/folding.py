"""Scales of inputs, folded into what makes them: a norm's weight, or the rows of the linear before.

In a layer of the Llama family attention's and the feed-forward's inputs come from norms, and what
`down_proj` reads is linear in `up_proj`. `o_proj` is left as it is: several heads share a `v_proj`.

Shape letters: O output features, I input features, R the rows that are tried.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pippin.model.config import ModelConfig
from pippin.model.weights import Tensors
from pippin.quantizers.awq import Folding, find_scale
from pippin.quantizers.choices import Choice
from pippin.stages.calibration import Calibration

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
# By the first linear that reads some inputs: what makes them, and all the linears that read them.
FOLDS = {
    "self_attn.q_proj": (
        "input_layernorm",
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ),
    "mlp.gate_proj": ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    "mlp.down_proj": ("mlp.up_proj", ("mlp.down_proj",)),
}
# One row in so many is tried with every scale.
_EVERY = 4


def fold(
    calibration: Calibration,
    choices: Mapping[str, Choice],
    parts: tuple[dict[str, str], ...],
    config: ModelConfig,
) -> Folding:
    """A scale for the inputs of every layer's linears that can be folded."""
    folding, checkpoint = Folding(), calibration.checkpoint
    if config.model_type not in MODEL_TYPES:
        return folding
    for part in parts:
        for name, hessian in calibration.hessians(part):
            source, readers = _fold_of(name)
            grids = {reader: choices[reader].grid for reader in readers if reader in choices}
            if not readers or hessian is None or len(grids) < len(readers):
                continue
            rows = {reader: _rows(checkpoint, reader) for reader in readers}
            some = [(rows[r], grid) for r, grid in grids.items() if grid is not None]
            if len(some) < len(readers) or source not in checkpoint.tensors:
                continue  # one is kept dense, and would be rounded by its scale
            scale_I = find_scale(some, checkpoint.tensors[name].dtype, hessian)
            if len(checkpoint.tensors[source].shape) == 1:
                scale_I = _exact(checkpoint.read(source), scale_I)
            folding.inputs.update(dict.fromkeys(readers, scale_I))
            folding.outputs[source] = scale_I
    return folding


def _fold_of(name: str) -> tuple[str, tuple[str, ...]]:
    """What makes the inputs of a tensor, and all that read them; nothing for other tensors."""
    for first, (source, readers) in FOLDS.items():
        if name.endswith(f".{first}.weight"):
            layer = name.removesuffix(f"{first}.weight")
            return f"{layer}{source}.weight", tuple(f"{layer}{r}.weight" for r in readers)
    return "", ()


def _rows(checkpoint: Tensors, name: str) -> NDArray[np.float32]:
    return checkpoint.read(name)[::_EVERY].astype(np.float32)


def _exact(norm_I: NDArray[Any], scale_I: NDArray[np.float32]) -> NDArray[np.float32]:
    """The scales nearby by which the norm's weight is divided exactly in its own dtype."""
    whole_I = norm_I.astype(np.float32)
    stored_I = (whole_I / scale_I).astype(norm_I.dtype).astype(np.float32)
    usable_I = (stored_I != 0) & np.isfinite(stored_I)
    return np.where(usable_I, whole_I / np.where(usable_I, stored_I, 1), scale_I)
