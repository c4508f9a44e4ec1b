"""Whether mlx-lm has a model's architecture; nothing is loaded to tell."""

from pathlib import Path

from pippin.errors import Refusal
from pippin.model.config import read_raw


def refusal(folder: Path) -> Refusal | None:
    """Why it does not, as (message, hint)."""
    from pippin.engines.mlx.blas import preload

    preload()  # mlx-lm imports MLX
    from mlx_lm import models
    from mlx_lm.utils import MODEL_REMAPPING

    family = read_raw(folder).get("model_type", "")
    if Path(models.__path__[0], f"{MODEL_REMAPPING.get(family, family)}.py").is_file():
        return None
    return (
        f"{folder}: mlx-lm has no model for {family or 'this config'}",
        "set model.engine = torch, or choose a model whose architecture mlx-lm knows",
    )
