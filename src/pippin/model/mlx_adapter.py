"""mlx-lm's adapter folders, read and written: PEFT's pairs, transposed, under other names.

Shape letters: I input features, O output features, R rank.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pippin.errors import ModelError
from pippin.model import names
from pippin.model.tensors import file_tensors, read_tensor
from pippin.model.weights import Writer
from pippin.recipe import Lora

WEIGHTS = "adapters.safetensors"
FOLDER = "mlx-lm"  # below the adapter's own
_PARTS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": names.MAGNITUDE}
_BLOCK = re.compile(r".*?\.\d+\.(.+)")


def is_one(folder: Path) -> bool:
    """Whether mlx-lm wrote this folder."""
    return (folder / WEIGHTS).is_file()


def read(folder: Path, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """PEFT's configuration and pairs, `lora_A` (R, I) and `lora_B` (O, R), float32; DoRA's vectors.

    `raw` is the folder's adapter_config.json. Raises ModelError for what is no LoRA of a linear.
    """
    kind = raw.get("fine_tune_type", "lora")
    asked = raw.get("lora_parameters")
    if kind not in ("lora", "dora") or not isinstance(asked, dict):
        raise ModelError(
            f"{folder} is an mlx-lm adapter of type {kind}",
            "pippin applies LoRA: fuse it with mlx_lm.fuse and start from the fused model",
        )
    weights = {}
    for key, info in file_tensors(folder / WEIGHTS).items():
        found = re.fullmatch(r"(.+)\.(lora_[ab]|m)", key)
        if found is None or len(info.shape) != (1 if found[2] == "m" else 2):
            raise ModelError(
                f"{folder} holds {key} of shape {info.shape}, which is no LoRA matrix of a linear",
                "fuse it with mlx_lm.fuse and start from the fused model",
            )
        tensor = read_tensor(info).astype(np.float32).T
        part = _PARTS[found[2]]
        weights[f"{found[1]}.{part}"] = np.ascontiguousarray(tensor)
    ranks = {w.shape[0] for name, w in weights.items() if name.endswith("lora_A.weight")}
    if len(ranks) != 1:
        raise ModelError(f"{folder} holds pairs of ranks {sorted(ranks)}", "save it again")
    rank = ranks.pop()
    scale = {"r": rank, "lora_alpha": asked["scale"] * rank}
    return {"peft_type": "LORA", "use_dora": kind == "dora", **scale}, weights


def refuse_unwritable(linears: Iterable[str]) -> None:
    """Raise ModelError for a linear outside the decoder layers, where mlx-lm has no adapter."""
    outside = [name for name in linears if names.layer(name) is None]
    if outside:
        raise ModelError(
            f"mlx-lm's layout has no place for an adapter of {outside[0]}",
            "leave it out of lora.targets, or set lora.mlx_lm = false",
        )


def write(folder: Path, lora: Lora, weights: Mapping[str, NDArray[Any]], num_layers: int) -> None:
    """The adapter for `mlx_lm.load(..., adapter_path=folder)`; layers without a pair get none.

    `weights` are `lora_A` (R, I), `lora_B` (O, R) and DoRA's vectors; `num_layers` is the model's.
    """
    folder.mkdir()
    parts = {theirs: mine for mine, theirs in _PARTS.items()}
    tensors = {}
    for name, tensor in weights.items():
        linear, _, part = name.rpartition(".lora_")
        tensors[f"{linear}.{parts['lora_' + part]}"] = np.ascontiguousarray(tensor.T)
    with Writer(folder, tensors) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    (folder / "model.safetensors").rename(folder / WEIGHTS)
    linears = {name.rpartition(".lora_")[0] for name in weights}
    places = [found for linear in linears if (found := _BLOCK.fullmatch(linear))]
    first = min(layer for linear in linears if (layer := names.layer(linear)) is not None)
    keys = sorted({found[1] for found in places})
    settings = {"rank": lora.rank, "scale": lora.scale, "dropout": lora.dropout, "keys": keys}
    config = {"fine_tune_type": "dora" if lora.dora else "lora", "num_layers": num_layers - first}
    text = json.dumps(config | {"lora_parameters": settings}, indent=2)
    (folder / names.ADAPTER_CONFIG).write_text(text + "\n")
