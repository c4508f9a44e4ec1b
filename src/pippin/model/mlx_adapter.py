"""mlx-lm's adapter folders, read as PEFT's: the same pairs, transposed, under other names.

Shape letters: I input features, O output features, R rank.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pippin.errors import ModelError
from pippin.model.tensors import file_tensors, read_tensor

WEIGHTS = "adapters.safetensors"


def is_one(folder: Path) -> bool:
    """Whether mlx-lm wrote this folder."""
    return (folder / WEIGHTS).is_file()


def read(folder: Path, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """PEFT's configuration and pairs, `lora_A` (R, I) and `lora_B` (O, R), float32.

    `raw` is the folder's adapter_config.json. Raises ModelError for what is no plain LoRA.
    """
    kind = raw.get("fine_tune_type", "lora")
    asked = raw.get("lora_parameters")
    if kind != "lora" or not isinstance(asked, dict):
        raise ModelError(
            f"{folder} is an mlx-lm adapter of type {kind}",
            "pippin applies LoRA: fuse it with mlx_lm.fuse and start from the fused model",
        )
    weights = {}
    for key, info in file_tensors(folder / WEIGHTS).items():
        found = re.fullmatch(r"(.+)\.lora_([ab])", key)
        if found is None or len(info.shape) != 2:
            raise ModelError(
                f"{folder} holds {key} of shape {info.shape}, which is no LoRA matrix of a linear",
                "fuse it with mlx_lm.fuse and start from the fused model",
            )
        pair = read_tensor(info).astype(np.float32).T
        weights[f"{found[1]}.lora_{found[2].upper()}.weight"] = np.ascontiguousarray(pair)
    ranks = {w.shape[0] for name, w in weights.items() if name.endswith("lora_A.weight")}
    if len(ranks) != 1:
        raise ModelError(f"{folder} holds pairs of ranks {sorted(ranks)}", "save it again")
    rank = ranks.pop()
    return {"peft_type": "LORA", "r": rank, "lora_alpha": asked["scale"] * rank}, weights
