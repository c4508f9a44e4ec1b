"""Rotary frequencies of a layer kind, with the scalings that Llama, Qwen, Gemma and Mistral use.

Shape letters: C head channels.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pippin.errors import ModelError

SCALINGS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """C/2 frequencies in radians a position; cosine and sine are multiplied by `factor`."""

    frequencies: tuple[float, ...]
    factor: float = 1.0


def make_rope(figures: Mapping[str, Any], channels: int, max_positions: int) -> Rope:
    """The frequencies that a config's rope table describes.

    Formulas: linear interpolation (arXiv 2306.15595), YaRN (arXiv 2309.00071), Llama 3.1's bands.
    Raises ModelError for another scaling, or a head that is rotated in part.
    """
    kind = figures.get("rope_type", "default")
    if kind not in SCALINGS or figures.get("partial_rotary_factor", 1.0) != 1.0:
        part = figures.get("partial_rotary_factor", 1.0)
        raise ModelError(
            f"the engine jax does not know rope scaling {kind!r} over {part:g} of a head",
            f"it knows {', '.join(SCALINGS)} over whole heads; use engine torch",
        )
    powers = np.arange(0, channels, 2, dtype=np.float32) / np.float32(channels)
    plain = (1.0 / np.float32(figures["rope_theta"]) ** powers).astype(np.float32)
    if kind == "linear":
        return Rope(frequencies=_tuple(plain / np.float32(figures["factor"])))
    if kind == "llama3":
        return Rope(frequencies=_tuple(_llama3(plain, figures, max_positions)))
    if kind == "yarn":
        return _yarn(plain, figures, max_positions)
    return Rope(frequencies=_tuple(plain))


def _llama3(plain: NDArray[Any], figures: Mapping[str, Any], positions: int) -> NDArray[Any]:
    """Short waves stay, long ones are divided by `factor`, a band between them is blended."""
    old = figures.get("original_max_position_embeddings") or positions
    low, high = figures["low_freq_factor"], figures["high_freq_factor"]
    waves = 2 * math.pi / plain
    blend = np.clip((old / waves - low) / (high - low), 0, 1)
    return plain * blend + plain / figures["factor"] * (1 - blend)


def _yarn(plain: NDArray[Any], figures: Mapping[str, Any], positions: int) -> Rope:
    """Interpolated below `beta_slow` turns within the old context, kept above `beta_fast`."""
    old = figures.get("original_max_position_embeddings") or positions
    factor = figures.get("factor") or positions / old
    fast, slow = figures.get("beta_fast") or 32, figures.get("beta_slow") or 1
    channels, theta = 2 * len(plain), figures["rope_theta"]
    low, high = (
        channels * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (fast, slow)
    )
    if figures.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, channels - 1)
    ramp = (np.arange(len(plain)) - low) / (high - low if high != low else 0.001)
    blend = np.clip(ramp, 0, 1)
    frequencies = plain / factor * blend + plain * (1 - blend)
    return Rope(frequencies=_tuple(frequencies), factor=_yarn_factor(figures, factor))


def _yarn_factor(figures: Mapping[str, Any], factor: float) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if figures.get("attention_factor") is not None:
        return float(figures["attention_factor"])
    both = figures.get("mscale"), figures.get("mscale_all_dim")
    return scale(both[0]) / scale(both[1]) if both[0] and both[1] else scale(1.0)


def _tuple(values: NDArray[Any]) -> tuple[float, ...]:
    return tuple(values.astype(np.float32).tolist())
