"""How large the thing is that one would ship: bytes of its weights files, and bits a weight."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pippin import artifact
from pippin.model.quantized import count_weights

# Beside the weights: the tokenizer, the template, and what pippin says about them.
_DESCRIPTIONS = {"", ".json", ".jinja", ".jsonl", ".md", ".model", ".py", ".txt"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shipped:
    """`weights` counts the dense model's parameters, None where nobody counted them."""

    size_bytes: int
    weights: int | None

    @property
    def bits_per_weight(self) -> float | None:
        """Everything in the weights files, scales and headers included, over the parameters."""
        return None if self.weights is None else 8 * self.size_bytes / self.weights


def measure_shipped(inputs: Mapping[str, Path], parent: Mapping[str, Any]) -> Shipped:
    """Size of a model folder, of a model with its adapter, or of a deployed bundle.

    `parent` are the scores of what a bundle was made from: its weights are counted there.
    """
    if "bundle" in inputs:
        return Shipped(size_bytes=bundle_bytes(inputs["bundle"]), weights=parent.get("weights"))
    folders = [inputs[role] for role in ("model", "adapter") if role in inputs]
    return Shipped(
        size_bytes=sum(weights_bytes(folder) for folder in folders),
        weights=count_weights(inputs["model"]),
    )


def weights_bytes(folder: Path) -> int:
    """Bytes of the safetensors files directly in a folder."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def bundle_bytes(folder: Path) -> int:
    """Bytes of a deployed bundle without its tokenizer and descriptions."""
    parts = (path for path in folder.iterdir() if path.suffix not in _DESCRIPTIONS)
    return sum(path.stat().st_size if path.is_file() else artifact.size(path) for path in parts)
