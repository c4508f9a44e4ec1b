"""Whether the JAX engine has a decoder for a model; JAX itself is not imported to tell."""

from pathlib import Path

from pippin.engines.jax.architecture import read_spec
from pippin.errors import ModelError, Refusal


def refusal(folder: Path) -> Refusal | None:
    """Why it does not, as (message, hint)."""
    try:
        read_spec(folder)
    except ModelError as error:
        return error.message, error.hint
    return None
