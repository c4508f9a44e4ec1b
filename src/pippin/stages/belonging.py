"""Tells whether an adapter belongs to a model, as far as the two folders can say."""

from pathlib import Path

import numpy as np

from pippin import artifact
from pippin.errors import ModelError
from pippin.figures import counted
from pippin.model import names
from pippin.model.adapter import Adapter
from pippin.model.quantized import DenseView

_ROWS = 64
_UNLIKE = 0.7


def check_base(
    adapter: Adapter, model: Path, digest: str, trained_on: Path | None = None
) -> list[str]:
    """Raise ModelError for an adapter of another base; what cannot be told, in words.

    `digest` is the model folder's. Our own adapters record their base's; others name a folder at
    most, and bring a copy of the embedding where they adapt it. `trained_on` is a folder that holds
    the model in fewer bits: the adapter must be of that one.
    """
    if trained_on is not None:
        notices = check_base(adapter, trained_on, artifact.digest(trained_on))
        return [*notices, compare_weights(trained_on, model)]
    refuse_other_copies(adapter, model)
    base = adapter.base
    if base is None:
        return ["the adapter does not say which model it was trained on: taken to be this one"]
    if base.digest:
        if base.digest != digest:
            raise ModelError(
                f"the adapter was trained on {base.name} with digest {base.digest[:12]}, "
                f"this model has {digest[:12]}",
                "use the weights it was trained on, or train it again on these; if it was trained "
                "on these in fewer bits, name that folder as model.adapter_base",
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


def compare_weights(rounded: Path, model: Path) -> str:
    """Raise ModelError where `rounded` is not `model` in fewer bits; how far it lies, in words.

    Of every tensor some rows are read. What `rounded` keeps whole must have equal numbers, which
    tells a model from one that was tuned a little; codes must lie as near as their bits allow.
    """
    small, whole = DenseView(rounded), DenseView(model)
    _refuse_missing(small, whole)
    moved = [0.0]
    for name in small.tensors:
        distance, allowed = _distance(small, whole, name), _allowed(small, name)
        if distance > allowed:
            raise ModelError(
                f"{name} of {rounded} lies {distance:.2g} of its size away from {model}'s; as it "
                f"is stored there, that can be {allowed:.2g} at most",
                "model.adapter_base must be model.source in fewer bits, with nothing else changed "
                "(AWQ changes norms too); if it is not, give it as model.source",
            )
        moved.append(distance)
    return (
        f"the adapter was trained on {rounded}: its weights are this model's, at most "
        f"{max(moved):.2g} of a tensor's size away"
    )


def _refuse_missing(small: DenseView, whole: DenseView) -> None:
    """Raise ModelError for weights that `whole` alone has, but for the copy of a tied head."""
    needed = {name for name in whole.tensors if name.endswith(".weight")}
    if whole.config.tied_embeddings:
        needed.discard(names.HEAD)
    missing = needed - small.tensors.keys()
    if missing:
        raise ModelError(
            f"{small.checkpoint.folder} lacks {counted(len(missing), 'weight')} of "
            f"{whole.checkpoint.folder}, such as {min(missing, key=names.natural)}",
            "model.adapter_base is the whole of model.source in fewer bits",
        )


def _distance(small: DenseView, whole: DenseView, name: str) -> float:
    """How far rows from the middle of a tensor lie apart, over their size in `whole`."""
    spec = small.tensors[name]
    source = embedding_of(whole) if names.is_head(name) and name not in whole.tensors else name
    found = whole.tensors.get(source)
    if found is None or found.shape != spec.shape:
        has = f"has {found.shape}" if found else "does not have it"
        raise ModelError(
            f"{name} of {small.checkpoint.folder} has shape {spec.shape}; "
            f"{whole.checkpoint.folder} {has}",
            "model.adapter_base is model.source in fewer bits",
        )
    if not spec.shape:
        return float(small.read(name) != whole.read(source))
    start = max(0, spec.shape[0] - _ROWS) // 2
    ours, theirs = (
        view.read_rows(each, start, min(start + _ROWS, spec.shape[0]))
        for view, each in ((small, name), (whole, source))
    )
    theirs = theirs.astype(ours.dtype).astype(np.float64)
    off = np.linalg.norm(ours.astype(np.float64) - theirs)
    return float(off / max(np.linalg.norm(theirs), np.finfo(np.float32).tiny))


def _allowed(small: DenseView, name: str) -> float:
    """Several times what rounding does: 64 normal weights span 4.8 deviations, so that b bits move
    them by 1.4 / (2^b - 1). Weights that have nothing to do with each other lie 1.4 apart."""
    if name in small.floats:
        return _UNLIKE
    return min(_UNLIKE, 8 / (2 ** small.grids[name].bits - 1)) if name in small.grids else 0.0


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
