"""How many updates a training takes: its rows, tokenized and packed as the training will do it."""

from pippin.artifact import Origin
from pippin.job import Job
from pippin.recipe import Recipe
from pippin.stages.preparing import prepare
from pippin.steps import model_folder, run_folder


def count_updates(recipe: Recipe) -> int | None:
    """Updates of the whole training; None while the model, and its tokenizer, are not here."""
    model = model_folder(recipe)
    if recipe.train.steps is not None or not (model / "config.json").is_file():
        return recipe.train.steps
    nothing = Origin(stage="train", inputs={}, settings={}, versions={})
    job = Job(
        stage="train",
        recipe=recipe,
        inputs={"model": model},
        folder=run_folder(recipe) / "train",
        origin=nothing,
    )
    return prepare(job).total
