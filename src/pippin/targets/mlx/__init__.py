"""A folder for mlx-lm on Apple silicon: our own layout, with keys where mlx-lm looks for them."""

from collections.abc import Iterator
from pathlib import Path

from pippin.engines import Scorer
from pippin.events import Event
from pippin.model.config import read_config
from pippin.quantizers import Grid
from pippin.recipe import Quantize
from pippin.targets import Bundle, Refusal

# Families that mlx-lm computes as transformers does, compared by a test.
MODEL_TYPES = ("gemma3_text", "llama", "mistral", "qwen2", "qwen3")


class Mlx:
    """The target; its packages are imported when it writes or loads."""

    def refusal(self, quantize: Quantize, checkpoint: Path) -> Refusal | None:
        """Why mlx-lm cannot run such a model, as (message, hint). It holds all codes."""
        kind = read_config(checkpoint).model_type
        if kind in MODEL_TYPES:
            return None
        return (
            f"mlx: model type {kind} was not compared with mlx-lm, only {', '.join(MODEL_TYPES)}",
            "deploy a model of one of these families",
        )

    def stored_bits(self, grid: Grid, inputs: int) -> float:
        """Every group has a scale and a bias, symmetric ones too."""
        return grid.bits + 32 / grid.group_size

    def write(self, bundle: Bundle) -> Iterator[Event]:
        """Make, describe and check the bundle. Raises what writing.write raises."""
        from pippin.targets.mlx import writing

        yield from writing.write(bundle)

    def load(self, folder: Path) -> Scorer:
        """The folder in mlx-lm. Raises ModelError for an incomplete bundle."""
        from pippin.targets.mlx import writing

        return writing.load(folder)


def make_target() -> Mlx:
    """The target's entry in the table."""
    return Mlx()
