"""Whether a quantized folder is whole, asked before a target writes it: tensors, shapes, values."""

from pathlib import Path

from pippin.errors import ModelError
from pippin.model.config import ModelConfig
from pippin.model.names import HEAD
from pippin.model.quantized import DenseView
from pippin.model.weights import is_finite, row_chunks

_CHUNK_BYTES = 32 << 20


def require_sound(folder: Path) -> None:
    """Raises ModelError for a tensor that is missing, of another shape, or not finite."""
    view = DenseView(folder)
    _require_shapes(folder, view)
    _require_finite(folder, view)


def expected_shapes(folder: Path, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """What transformers expects of a folder's config, without making it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder, local_files_only=True)
        )
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    if config.tied_embeddings:
        shapes.pop(HEAD, None)
    return shapes


def _require_shapes(folder: Path, view: DenseView) -> None:
    if "auto_map" in view.config.raw:
        return  # its code came with the model
    wanted = expected_shapes(folder, view.config)
    for name in wanted.keys() & view.tensors.keys():
        found = view.tensors[name].shape
        if found != wanted[name]:
            raise ModelError(
                f"{folder}: {name} has shape {found}, config.json makes it {wanted[name]}",
                "config.json and the weights are not of one model: quantize again",
            )
    # Some architectures are stored under other names than they are computed under.
    if view.tensors.keys() <= wanted.keys() and (missing := wanted.keys() - view.tensors.keys()):
        raise ModelError(
            f"{folder} lacks {min(missing)} ({len(missing)} in all)",
            "give the whole folder that quantize wrote",
        )


def _require_finite(folder: Path, view: DenseView) -> None:
    checkpoint = view.checkpoint
    for name, info in checkpoint.tensors.items():
        if info.dtype.kind in "iu" or not info.shape:
            continue
        for start, stop in row_chunks(info, _CHUNK_BYTES):
            if not is_finite(checkpoint.read_rows(name, start, stop)):
                raise ModelError(
                    f"{folder}: {name} holds values that are not finite",
                    "the training diverged, or the file is damaged: train or quantize again",
                )
