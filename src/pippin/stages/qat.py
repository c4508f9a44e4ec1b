"""Quantization-aware training: the last stretch of training runs on what will be deployed.

The codes stay; their scales and zero points follow the loss on the training rows, rounded in every
forward pass as they are stored. So the folder computes what the last update trained.
"""

from collections.abc import Iterator
from dataclasses import replace

from pippin.engines import CodesTrainable, Engine, Trainer
from pippin.errors import ModelError
from pippin.events import Event
from pippin.figures import counted
from pippin.job import Job
from pippin.recipe import Recipe, Train
from pippin.stages.outcome import write_model
from pippin.stages.train import Course, follow

WARMUP = 0.1  # of all updates


def qat(job: Job) -> Iterator[Event]:
    """Write the quantized folder with trained scales, or as it was where validation prefers it.

    Raises what a training raises, and ModelError for an engine that trains no scales.
    """
    recipe = job.recipe
    course = Course(
        title=f"train scales for {counted(recipe.qat.steps, 'update')}",
        begin=_begin,
        write=lambda folder, job, weights: write_model(folder, job.inputs["model"], weights),
        after=recipe.train,
        compared=True,
    )
    yield from follow(replace(job, recipe=replace(recipe, train=settings(recipe))), course)


def settings(recipe: Recipe) -> Train:
    """[train] as it holds for scales."""
    asked = recipe.qat
    return replace(
        recipe.train,
        steps=asked.steps,
        learning_rate=asked.learning_rate,
        min_learning_rate=0.0,
        warmup_steps=int(WARMUP * asked.steps),
        frozen_dtype="auto",
        compile=False,  # what compiles is an adapter's layer
    )


def _begin(job: Job, engine: Engine) -> Trainer:
    recipe = job.recipe
    model = engine.load(job.inputs["model"], recipe.model.dtype)
    if not isinstance(model, CodesTrainable):
        raise ModelError(
            f"engine {recipe.model.engine} trains no scales of codes",
            'set model.engine = "torch" or "mlx", or qat.steps = 0',
        )
    return model.codes_trainer(recipe.train, recipe.seed)
