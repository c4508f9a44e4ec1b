"""What a training leaves: an adapter in PEFT's format, or a whole model in Hugging Face's."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from pippin.engines import Weights
from pippin.errors import ModelError
from pippin.job import Job
from pippin.model import mlx_adapter, names
from pippin.model.adapter import (
    Base,
    adapted_linears,
    first_magnitudes,
    new_adapter,
    save_adapter,
)
from pippin.model.config import read_config
from pippin.model.source import copy_side_files
from pippin.model.weights import Checkpoint, Spec, TensorInfo, Writer


def first_weights(job: Job) -> Weights:
    """The adapter that training starts from, drawn from the seed; nothing for a full training."""
    recipe, model = job.recipe, job.inputs["model"]
    if recipe.train.method == "full":
        refuse_quantized(model)
        return {}
    linears = adapted_linears(Checkpoint(model), recipe.lora)
    if recipe.lora.mlx_lm:
        mlx_adapter.refuse_unwritable(linears)
    weights = new_adapter(linears, recipe.lora, recipe.seed)
    if recipe.lora.dora:
        weights |= first_magnitudes(Checkpoint(model), linears)
    return weights


def refuse_quantized(model: Path) -> None:
    """Every weight of a quantized model cannot be trained: its steps are too coarse."""
    if read_config(model).quantization:
        raise ModelError(
            f"{model} is quantized: its weights cannot all be trained",
            "set train.method = lora, or start from the weights it was quantized from",
        )


def write_outcome(folder: Path, job: Job, weights: Weights) -> None:
    """Fill the stage's folder from the trained tensors, float32 by checkpoint name."""
    model = job.inputs["model"]
    if job.recipe.train.method == "full":
        write_model(folder, model, weights)
    else:
        base = Base(name=job.recipe.model.source, digest=job.origin.inputs["model"])
        save_adapter(folder, job.recipe.lora, weights, base)
        if job.recipe.lora.mlx_lm:
            layers = read_config(model).num_layers
            mlx_adapter.write(folder / mlx_adapter.FOLDER, job.recipe.lora, weights, layers)


def write_model(folder: Path, base: Path, weights: Weights) -> None:
    """A folder like `base`: every tensor in its dtype there, those not among `weights` copied."""
    checkpoint = Checkpoint(base)
    infos = _kept(checkpoint.tensors, weights, read_config(base).tied_embeddings)
    with Writer(folder, infos) as writer:
        for name, info in infos.items():
            tensor = weights[name] if name in weights else checkpoint.read(name)
            writer.write(name, tensor.astype(info.dtype, copy=False))
    shutil.copyfile(base / names.CONFIG, folder / names.CONFIG)
    copy_side_files(base, folder)


def _kept(tensors: Mapping[str, TensorInfo], weights: Weights, tied: bool) -> dict[str, Spec]:
    """A tied head's copy in the base is left out: it would overwrite the trained embedding."""
    unknown = sorted(weights.keys() - tensors.keys())
    assert not unknown, unknown
    return {
        name: Spec(shape=info.shape, dtype=info.dtype)
        for name, info in tensors.items()
        if name in weights or not (tied and names.is_head(names.module(name)))
    }
