"""A process that follows the first: it loads the same model and makes the same updates."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pippin.data.batches import Batch
from pippin.engines import Weights
from pippin.engines.mlx.ring import Message, Ring
from pippin.errors import ModelError, PippinError
from pippin.recipe import Lora, Train

if TYPE_CHECKING:
    from pippin.engines.mlx.engine import MlxEngine, MlxModel

NAMES = tuple(field.name for field in fields(Batch))


def follow(engine: "MlxEngine", ring: Ring) -> str:
    """Do what the first process tells, until its run is over; why that failed, or nothing.

    Raises PippinError where this process cannot go on, or another one has ended.
    """
    trainer: Any = None
    while (told := ring.hear()).what != "over":
        if told.what == "step":
            trainer.step(as_batches(told.arrays), told.settings["learning_rate"])
        elif told.what == "restore":
            trainer.restore(told.arrays)
        else:
            trainer = None  # its memory is the next one's
            trainer = _begin(engine, ring, told)
    return told.settings["fault"]


def _begin(engine: "MlxEngine", ring: Ring, told: Message) -> Any:
    settings, fault, model = told.settings, None, None
    try:
        model = _load(engine, Path(settings["checkpoint"]), settings["dtype"])
    except PippinError as error:
        fault = error
    ring.agree(fault)
    assert model is not None
    train, seed = Train(**settings["train"]), settings["seed"]
    if told.what == "train on codes":
        return model.codes_trainer(train, seed)
    lora = settings["lora"] and Lora(**settings["lora"])
    return model.trainer(train, lora, told.arrays, seed)


def _load(engine: "MlxEngine", checkpoint: Path, dtype: str) -> "MlxModel":
    if not checkpoint.is_dir():
        raise ModelError(
            f"{checkpoint} is not on this machine",
            "put what the first machine has there in the same place, or share its folder",
        )
    return engine.load(checkpoint, dtype)


def as_arrays(batches: Sequence[Batch]) -> Weights:
    """An update's micro-batches by name, in their order."""
    return {f"{i}.{name}": getattr(b, name) for i, b in enumerate(batches) for name in NAMES}


def as_batches(arrays: Weights) -> list[Batch]:
    """The inverse of `as_arrays`."""
    count = range(len(arrays) // len(NAMES))
    return [Batch(**{name: arrays[f"{number}.{name}"] for name in NAMES}) for number in count]
