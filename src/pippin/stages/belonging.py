"""Tells whether an adapter belongs to a model, as far as the two folders can say."""

from pathlib import Path

import numpy as np

from pippin import artifact
from pippin.errors import ModelError
from pippin.model import names
from pippin.model.adapter import Adapter
from pippin.model.quantized import DenseView


def check_base(adapter: Adapter, model: Path, digest: str) -> list[str]:
    """Raise ModelError for an adapter of another base; what cannot be told, in words.

    `digest` is the model folder's. Our own adapters record their base's; others name a folder at
    most, and bring a copy of the embedding where they adapt it.
    """
    refuse_other_copies(adapter, model)
    base = adapter.base
    if base is None:
        return ["the adapter does not say which model it was trained on: taken to be this one"]
    if base.digest:
        if base.digest != digest:
            raise ModelError(
                f"the adapter was trained on {base.name} with digest {base.digest[:12]}, "
                f"this model has {digest[:12]}",
                "use the weights it was trained on, or train it again on these",
            )
        return []
    return _check_named(Path(base.name).expanduser(), model)


def _check_named(folder: Path, model: Path) -> list[str]:
    """PEFT writes a name alone: a folder that it leads to must hold the same weights."""
    if not (folder / names.CONFIG).is_file():
        return [
            f"the adapter was trained on {folder}, which is not on this disk: whether this model "
            "has the same weights cannot be told"
        ]
    if not folder.samefile(model) and _weights(folder) != _weights(model):
        raise ModelError(
            f"the adapter was trained on {folder}, and {model} has other weights",
            "use the weights it was trained on; if they are the same in other files, name this "
            f"folder as base_model_name_or_path in {names.ADAPTER_CONFIG}",
        )
    return []


def _weights(folder: Path) -> list[str]:
    return [artifact.digest(path) for path in sorted(folder.glob("*.safetensors"))]


def refuse_other_copies(adapter: Adapter, model: Path) -> None:
    """Raise ModelError where the adapter stores an embedding or head that is not the base's."""
    if not adapter.copies:
        return
    base = DenseView(model)
    for name, copy in adapter.copies.items():
        source = name if name in base.tensors else embedding_of(base)
        if base.tensors[source].shape != copy.shape or not np.array_equal(
            base.read(source).astype(np.float32), copy.astype(np.float32)
        ):
            raise ModelError(
                f"the adapter brings a {name} of its own, which is not the base's",
                "merge it with peft and start from the merged model",
            )


def embedding_of(base: DenseView) -> str:
    """The embedding's name. Raises ModelError where no tensor has a known one."""
    found = [name for name in base.tensors if names.is_embedding(names.module(name))]
    if len(found) != 1:
        raise ModelError(
            f"{base.checkpoint.folder} ties its head to an embedding that pippin does not find",
            "leave embedding and head out of the adapter",
        )
    return found[0]
