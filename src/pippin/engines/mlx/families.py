"""Whether mlx-lm has a model's architecture; nothing is loaded to tell."""

from importlib.util import find_spec
from pathlib import Path

from pippin.errors import Refusal
from pippin.model.config import read_raw


def refusal(folder: Path) -> Refusal | None:
    """Why it does not, as (message, hint)."""
    from mlx_lm.utils import MODEL_REMAPPING

    family = read_raw(folder).get("model_type", "")
    if find_spec(f"mlx_lm.models.{MODEL_REMAPPING.get(family, family)}"):
        return None
    return (
        f"{folder}: mlx-lm has no model for {family or 'this config'}",
        "set model.engine = torch, or choose a model whose architecture mlx-lm knows",
    )
