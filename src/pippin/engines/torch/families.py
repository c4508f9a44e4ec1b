"""Whether transformers has a causal language model of a folder's kind."""

from pathlib import Path

from pippin.errors import Refusal
from pippin.model.config import read_raw

# Known without importing transformers' models, which takes seconds.
COMMON = {"gemma2", "gemma3_text", "gpt2", "llama", "mistral", "phi3", "qwen2", "qwen3"}


def refusal(folder: Path) -> Refusal | None:
    """Why it does not, as (message, hint); a folder's own code is asked when it is loaded."""
    raw = read_raw(folder)
    family = raw.get("model_type", "")
    if family in COMMON or raw.get("auto_map"):
        return None
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    if family in KNOWN:
        return None
    return (
        f"{folder}: transformers has no causal language model for {family or 'this config'}",
        "choose a model that generates text, or update transformers",
    )
