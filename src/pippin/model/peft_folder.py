"""What lies in a PEFT folder: its configuration, and which tensor belongs where."""

import json
import re
from pathlib import Path
from typing import Any

from pippin.errors import ModelError
from pippin.model import names

# Switches of PEFT's LoRA that change the arithmetic, and the value under which they do not.
_PLAIN = {
    "bias": "none",
    "modules_to_save": None,
    "lora_bias": False,
    "use_qalora": False,
    "layer_replication": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "ensure_weight_tying": False,
    "alora_invocation_tokens": None,
    "use_bdlora": None,
    "arrow_config": None,
}
# Initialisations that change the base weights: the adapter alone does not tell the model.
_MOVED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def read_config(folder: Path) -> dict[str, Any]:
    """The adapter's settings, as PEFT names them. Raises ModelError where there are none."""
    path = folder / names.ADAPTER_CONFIG
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(
            f"{folder} is no adapter: it has no {names.ADAPTER_CONFIG}", "give a PEFT folder"
        ) from None
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}", "save the adapter again") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("r", 0), int):
        raise ModelError(f"{path} is no PEFT configuration", "save the adapter again")
    return raw


def refuse_unknown(folder: Path, raw: dict[str, Any]) -> None:
    """Raise ModelError for settings that change the arithmetic and are not applied here."""
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"{folder} is an adapter of type {kind}", "pippin applies LoRA adapters")
    for switch, plain in _PLAIN.items():
        value = raw.get(switch, plain)
        if value != plain and value:
            raise ModelError(
                f"{folder} uses {switch} = {value!r}, which pippin does not apply",
                "merge it with peft and start from the merged model",
            )
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_MOVED_BASE):
        raise ModelError(
            f"{folder} was started with init_lora_weights = {start!r}, which changes the base",
            "convert it to a plain LoRA with peft, or merge it there",
        )


def weights_file(folder: Path) -> Path:
    """The adapter's tensors. Raises ModelError where they are not safetensors."""
    path = folder / names.ADAPTER_WEIGHTS
    if not path.exists():
        raise ModelError(
            f"{folder} has no {names.ADAPTER_WEIGHTS}",
            "pickled adapters are not read: save it as safetensors with peft",
        )
    return path


def whole_weight(key: str) -> str | None:
    """The weight that peft stored whole: embedding or head, where one of them is adapted."""
    name = key.removeprefix(names.PEFT_PREFIX).replace(".base_layer.", ".")
    module = names.module(name)
    whole = name.endswith(".weight") and (names.is_embedding(module) or names.is_head(module))
    return name if whole else None


def parse_key(folder: Path, key: str) -> tuple[str, str]:
    """The module, and `A`, `B`, `embedding_A`, `embedding_B` or `magnitude_vector`."""
    found = re.fullmatch(
        r"(?:base_model\.model\.)?(.+)\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)"
        r"(?:\.default)?(?:\.weight)?",
        key,
    )
    if found is None:
        raise ModelError(
            f"{folder} holds {key}, which is no part of a LoRA",
            "merge it with peft and start from the merged model",
        )
    return found[1].replace(".base_layer", ""), found[2]
