"""LoRA adapters as plain arrays in PEFT's folder format, drawn once here for every engine.

Shape letters: I input features, O output features, R rank.
"""

import difflib
import fnmatch
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pippin.errors import ModelError, Refusal, UsageError
from pippin.model import mlx_adapter, names
from pippin.model.config import read_raw
from pippin.model.peft_folder import (
    parse_key,
    read_config,
    refuse_unknown,
    weights_file,
    whole_weight,
)
from pippin.model.quantized import DenseView
from pippin.model.weights import Checkpoint, Writer, file_tensors, read_tensor, row_chunks
from pippin.recipe import Lora

Weights: TypeAlias = dict[str, NDArray[Any]]

BASE = "base.json"
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """The model an adapter belongs to: how it was named, and the digest of its folder."""

    name: str
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """A loaded adapter: `<linear>.lora_A.weight` (R, I) and `<linear>.lora_B.weight` (O, R).

    All are float32. DoRA adds `<linear>.lora_magnitude_vector` (O,). `embeddings` names the pairs
    that belong to an embedding: B is (V, R) there and A (R, D), so that the update of any weight is
    scale_of(name) * B @ A. `copies` are embeddings that peft stored beside the adapter; they are
    the base's own unless its vocabulary was resized.
    """

    weights: Weights
    rank: int
    scale_of: Callable[[str], float]
    raw: dict[str, Any]
    base: Base | None
    embeddings: frozenset[str] = frozenset()
    copies: Weights = field(default_factory=dict)

    @property
    def linears(self) -> list[str]:
        """The adapted modules, by the names their weights have without `.weight`."""
        return sorted({name.rpartition(".lora_")[0] for name in self.weights}, key=names.natural)


def adapted_linears(checkpoint: Checkpoint, lora: Lora) -> dict[str, tuple[int, int]]:
    """Every linear that gets an adapter, and its (inputs, outputs), in the order of the layers.

    `lora.targets` are last names (`q_proj`), patterns over full names (`model.layers.1?.*`), or
    `all-linear`: every linear of the decoder layers. Raises UsageError for one that names none.
    """
    view = DenseView(checkpoint.folder)
    linears: dict[str, tuple[int, int]] = {}
    for tensor in sorted(view.tensors, key=names.natural):
        shape = view.tensors[tensor].shape
        if names.is_linear(tensor, shape):
            name = names.module(tensor)
            swap = names.is_transposed(view.config.model_type, name)
            linears[name] = (shape[0], shape[1]) if swap else (shape[1], shape[0])
    chosen = {name for target in lora.targets for name in _matches(target, linears)}
    return {name: shape for name, shape in linears.items() if name in chosen}


def refuse_experts(checkpoint: Checkpoint, lora: Lora) -> Refusal | None:
    """Why a mixture's linears cannot be trained as asked, as (message, hint).

    transformers computes a layer's experts as one stacked tensor; a model's own code may not.
    """
    experts = [name for name in adapted_linears(checkpoint, lora) if names.is_expert(name)]
    if not experts or "auto_map" in read_raw(checkpoint.folder):
        return None
    others = (name for name in adapted_linears(checkpoint, Lora()) if not names.is_expert(name))
    listed = sorted({f'"*.{".".join(name.split(".")[-2:])}"' for name in others})
    return (
        f"lora.targets: {len(experts)} linears of experts, such as {experts[0]}, take no adapter: "
        "they are computed as one",
        f"name the others: lora.targets = [{', '.join(listed)}]",
    )


def new_adapter(linears: Mapping[str, tuple[int, int]], lora: Lora, seed: int) -> Weights:
    """A uniform within 1 / sqrt(inputs), as peft draws it; B zero; all float32."""
    rng = np.random.default_rng(seed)
    weights: Weights = {}
    for name, (inputs, outputs) in linears.items():
        bound = inputs**-0.5
        a_RI = rng.uniform(-bound, bound, (lora.rank, inputs))
        weights[f"{name}.lora_A.weight"] = a_RI.astype(np.float32)
        weights[f"{name}.lora_B.weight"] = np.zeros((outputs, lora.rank), np.float32)
    return weights


def first_magnitudes(checkpoint: Checkpoint, linears: Iterable[str]) -> Weights:
    """`<linear>.lora_magnitude_vector` (O,) float32: the norms of every linear's rows, for DoRA."""
    view = DenseView(checkpoint.folder)
    return {
        f"{name}.{names.MAGNITUDE}": _row_norms(view, f"{name}.weight", name) for name in linears
    }


def _row_norms(view: DenseView, tensor: str, linear: str) -> NDArray[np.float32]:
    if names.is_transposed(view.config.model_type, linear):
        return np.linalg.norm(view.read(tensor).astype(np.float32), axis=0)
    chunks = row_chunks(view.tensors[tensor], _CHUNK_BYTES)
    rows = (view.read_rows(tensor, *chunk).astype(np.float32) for chunk in chunks)
    return np.concatenate([np.linalg.norm(some, axis=1) for some in rows])


def save_adapter(folder: Path, lora: Lora, weights: Weights, base: Base) -> None:
    """Write a PEFT folder, and beside PEFT's two files the base it was trained on."""
    tensors = {names.PEFT_PREFIX + name: weights[name] for name in sorted(weights)}
    with Writer(folder, tensors) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    (folder / "model.safetensors").rename(folder / names.ADAPTER_WEIGHTS)
    modules = {name.rpartition(".lora_")[0] for name in weights}
    # A list of last names means the same linears to peft, unless a pattern chose among them.
    by_last = not any("*" in target or "." in target for target in lora.targets)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.name,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "target_modules": sorted({names.last(m) for m in modules} if by_last else modules),
        "bias": "none",
        "fan_in_fan_out": any(names.is_transposed("gpt2", name) for name in modules),
        "inference_mode": True,
    }
    (folder / names.ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    (folder / BASE).write_text(json.dumps(asdict(base), indent=2) + "\n")


def load_adapter(folder: Path) -> Adapter:
    """A PEFT folder, or mlx-lm's. Raises ModelError for what cannot be applied, by name."""
    raw = read_config(folder)
    if mlx_adapter.is_one(folder):
        raw, weights = mlx_adapter.read(folder, raw)
        _check_pairs(folder, weights)
        _check_dora(folder, raw, weights, ())
        scale_of = _scales(raw, weights)
        return Adapter(weights=weights, rank=raw["r"], scale_of=scale_of, raw=raw, base=None)
    refuse_unknown(folder, raw)
    weights: Weights = {}
    copies: Weights = {}
    embeddings = set()
    for key, info in file_tensors(weights_file(folder)).items():
        copied = whole_weight(key)
        if copied:
            copies[copied] = read_tensor(info)
            continue
        linear, part = parse_key(folder, key)
        tensor = read_tensor(info).astype(np.float32)
        if part in ("embedding_A", "embedding_B"):
            # peft keeps (R, V) and (D, R) and applies their product transposed.
            part = "B" if part == "embedding_A" else "A"
            tensor = np.ascontiguousarray(tensor.T)
            embeddings.add(linear)
        name = f"lora_{part}.weight" if part in "AB" else names.MAGNITUDE
        weights[f"{linear}.{name}"] = tensor
    _check_pairs(folder, weights)
    _check_dora(folder, raw, weights, embeddings)
    return Adapter(
        weights=weights,
        rank=raw.get("r", 8),
        scale_of=_scales(raw, weights),
        raw=raw,
        base=_read_base(folder, raw),
        embeddings=frozenset(embeddings),
        copies=copies,
    )


def _matches(target: str, linears: Mapping[str, Any]) -> list[str]:
    if target == "all-linear":
        found = [name for name in linears if not names.is_head(name)]
    elif "*" in target or "?" in target:
        found = [name for name in linears if fnmatch.fnmatchcase(name, target)]
    else:
        found = [name for name in linears if name == target or name.endswith(f".{target}")]
    if not found:
        known = sorted({names.last(name) for name in linears})
        close = difflib.get_close_matches(target, [*known, "all-linear"], n=1)
        ask = f"did you mean {close[0]}? " if close else ""
        raise UsageError(
            f"lora.targets: no linear of this model matches {target!r}",
            f"{ask}its linears are {', '.join(known)}",
        )
    return found


def _check_pairs(folder: Path, weights: Weights) -> None:
    for name, tensor in weights.items():
        linear, _, part = name.rpartition(".lora_")
        if name.endswith(names.MAGNITUDE):
            _check_magnitude(folder, linear, weights)
            continue
        other = weights.get(f"{linear}.lora_{'B' if part.startswith('A') else 'A'}.weight")
        if other is None or tensor.ndim != 2 or other.ndim != 2:
            raise ModelError(f"{folder}: {name} is not half of a pair", "save the adapter again")
        if part.startswith("A") and tensor.shape[0] != other.shape[1]:
            raise ModelError(
                f"{folder}: {linear} has ranks {tensor.shape[0]} and {other.shape[1]}",
                "save the adapter again",
            )
    if not weights:
        raise ModelError(f"{folder} holds no tensors", "save the adapter again")


def _check_dora(
    folder: Path, raw: dict[str, Any], weights: Weights, embeddings: Collection[str]
) -> None:
    """A switch without its vectors, or the other way round, would be another model."""
    linears = {name.rpartition(".lora_")[0] for name in weights}
    have = {name for name in linears if f"{name}.{names.MAGNITUDE}" in weights}
    if have != (linears if raw.get("use_dora") else set()):
        one = min(linears - have or have)
        raise ModelError(
            f"{folder} says use_dora = {bool(raw.get('use_dora'))}, and its tensors of {one} do "
            "not agree",
            "save the adapter again",
        )
    if have & set(embeddings):
        raise ModelError(
            f"{folder} applies DoRA to the embedding {min(have & set(embeddings))}",
            "merge it with peft and start from the merged model",
        )


def _check_magnitude(folder: Path, linear: str, weights: Weights) -> None:
    """DoRA's vector has one number an output."""
    b_OR = weights.get(f"{linear}.lora_B.weight")
    found = weights[f"{linear}.{names.MAGNITUDE}"].shape
    if b_OR is None or found != b_OR.shape[:1]:
        raise ModelError(
            f"{folder}: {linear}.{names.MAGNITUDE} of shape {found} fits no pair",
            "save the adapter again",
        )


def _scales(raw: dict[str, Any], weights: Weights) -> Callable[[str], float]:
    ranks = {
        name.removesuffix(".lora_A.weight"): tensor.shape[0]
        for name, tensor in weights.items()
        if name.endswith(".lora_A.weight")
    }

    def scale_of(linear: str) -> float:
        rank = ranks[linear]
        alpha = _by_pattern(raw.get("alpha_pattern") or {}, linear, raw.get("lora_alpha", 8))
        return float(alpha) / (rank**0.5 if raw.get("use_rslora") else rank)

    return scale_of


def _by_pattern(patterns: dict[str, Any], linear: str, default: Any) -> Any:
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", linear):
            return value
    return default


def _read_base(folder: Path, raw: dict[str, Any]) -> Base | None:
    try:
        return Base(**json.loads((folder / BASE).read_text()))
    except (OSError, ValueError, TypeError):
        name = raw.get("base_model_name_or_path")
        return Base(name=name, digest="") if name else None
