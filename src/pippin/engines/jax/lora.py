"""Adapters as stacked arrays: a layer without a pair has zeros there, which training leaves alone.

Shape letters: L layers, R rank, I inputs, O outputs.
"""

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from pippin.engines import Weights
from pippin.engines.arrays import adapted, find_magnitude, find_pair
from pippin.engines.jax.architecture import Spec
from pippin.engines.jax.products import Lora, Pair
from pippin.errors import ModelError
from pippin.model.names import MAGNITUDE

# By linear within a layer: {"A": (L, R, I), "B": (L, O, R)} float32; DoRA's {VECTOR: (L, O)}.
Pairs: TypeAlias = dict[str, dict[str, Array]]
VECTOR = MAGNITUDE.removeprefix("lora_")
_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.lora_([AB])\.weight")


def scaled(pairs: Pairs, scale_L: Mapping[str, Array]) -> Lora:
    """A and scale * B, as the decoder reads them, and DoRA's vectors where a layer has one."""

    def read(pair: Mapping[str, Array], scale_L: Array) -> Pair:
        b_LOR = pair["B"] * scale_L[:, None, None]
        if VECTOR not in pair:
            return Pair(pair["A"], b_LOR)
        return Pair(pair["A"], b_LOR, jnp.where(scale_L[:, None] == 0, jnp.nan, pair[VECTOR]))

    return {name: read(pair, scale_L[name]) for name, pair in pairs.items()}


def stack_pairs(spec: Spec, weights: Weights) -> dict[str, dict[str, NDArray[Any]]]:
    """`<linear>.lora_A.weight` (R, I) and `<linear>.lora_B.weight` (O, R), by linear of a layer.

    DoRA's `<linear>.lora_magnitude_vector` (O,) stands beside them. Smaller ranks are filled up
    with zeros. Raises ModelError where the model has no such linear, or one of another shape.
    """
    pairs: dict[str, dict[str, NDArray[Any]]] = {}
    for name in adapted(weights):
        number, linear = _place(spec, name)
        outputs, inputs = spec.shapes()[f"{linear}.weight"]
        a_RI, b_OR = find_pair(weights, name, inputs, outputs)
        pair = pairs.setdefault(linear, _empty(spec, linear, _rank(weights, linear)))
        pair["A"][number, : a_RI.shape[0]] = a_RI
        pair["B"][number, :, : b_OR.shape[1]] = b_OR
        magnitude_O = find_magnitude(weights, name, outputs)
        if magnitude_O is not None:
            empty = np.zeros((spec.num_layers, outputs), np.float32)
            pair.setdefault(VECTOR, empty)[number] = magnitude_O
    return pairs


def stack_scales(spec: Spec, scale_of: Mapping[str, float]) -> dict[str, NDArray[np.float32]]:
    """By linear of a layer, (L,); `scale_of` is by full name."""
    scales: dict[str, NDArray[np.float32]] = {}
    for name, scale in scale_of.items():
        number, linear = _place(spec, name)
        scales.setdefault(linear, np.zeros(spec.num_layers, np.float32))[number] = scale
    return scales


def _place(spec: Spec, name: str) -> tuple[int, str]:
    found = _NAME.fullmatch(f"{name}.lora_A.weight")
    linear = found[2] if found else ""
    known = [n.removesuffix(".weight") for n, shape in spec.shapes().items() if len(shape) == 2]
    if found and linear in known and int(found[1]) < spec.num_layers:
        return int(found[1]), linear
    if name in ("lm_head", "model.embed_tokens"):
        raise ModelError(
            f"the adapter wants {name}; the engine jax adapts linears of the decoder layers",
            "use engine torch, or merge the adapter with `pippin merge`",
        )
    raise ModelError(
        f"the adapter wants {name}, the model has no such layer",
        "the adapter was trained on another base; name its base as model.source",
    )


def _rank(weights: Weights, linear: str) -> int:
    return max(w.shape[0] for n, w in weights.items() if n.endswith(f".{linear}.lora_A.weight"))


def _empty(spec: Spec, linear: str, rank: int) -> dict[str, NDArray[Any]]:
    outputs, inputs = spec.shapes()[f"{linear}.weight"]
    return {
        "A": np.zeros((spec.num_layers, rank, inputs), np.float32),
        "B": np.zeros((spec.num_layers, outputs, rank), np.float32),
    }
