"""The sizes that a check works at: those of a recipe, of a model folder, or the usual ones."""

from pathlib import Path

from pippin.check import Shapes
from pippin.errors import ModelError
from pippin.model.config import ModelConfig, read_config
from pippin.recipe_file import load_recipe
from pippin.steps import model_folder


def planned_shapes(what: Path | None) -> tuple[Path | None, Shapes]:
    """The model's folder and the sizes of `what`: a recipe (.toml), a folder, or nothing.

    Raises ModelError for a folder that holds no model; that of a recipe is fetched by its run.
    """
    if what is None:
        return None, Shapes()
    if what.suffix != ".toml":
        return what, _shapes(read_config(what), 1, Shapes().length)
    recipe = load_recipe(what)
    folder = model_folder(recipe)
    if not folder.is_dir():
        raise ModelError(f"{folder} is not there yet", f"`pippin data {what}` fetches the model")
    return folder, _shapes(read_config(folder), recipe.train.batch_rows, recipe.train.row_tokens)


def _shapes(config: ModelConfig, rows: int, length: int) -> Shapes:
    return Shapes(
        tokens=rows * length,
        length=length,
        vocab=config.vocab_size,
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
