"""A folder that is not whole is named before a target writes it."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.targets.tiny_quantized import KINDS

from pippin.errors import ModelError
from pippin.targets.soundness import require_sound

pytest.importorskip("torch")
pytestmark = pytest.mark.torch
DOWN = "model.layers.1.mlp.down_proj"


def change(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def say(folder: Path, **values) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


@pytest.mark.parametrize("kind", sorted([*KINDS, "gemma3"]))
def test_whole_folders_pass(quantized, kind):
    require_sound(quantized(kind))


@pytest.mark.parametrize("rows", [400, 310])
def test_vocabulary_rows_that_are_not_the_config_s(quantized, rows):
    folder = quantized()
    say(folder, vocab_size=rows)
    message = rf"embed_tokens.weight has shape \(320, 64\).*\({rows}, 64\)"
    with pytest.raises(ModelError, match=message):
        require_sound(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (f"{DOWN}.scales", np.nan),
        (f"{DOWN}.biases", np.inf),
        ("model.layers.0.input_layernorm.weight", np.nan),
    ],
)
def test_values_that_are_not_finite(quantized, name, value):
    def spoil(tensors):
        tensors[name] = tensors[name].copy()
        tensors[name].reshape(-1)[5] = value

    folder = quantized()
    change(folder, spoil)
    with pytest.raises(ModelError, match=f"{name} holds values that are not finite"):
        require_sound(folder)


def test_a_tensor_that_is_missing(quantized):
    def leave_out(tensors):
        for part in ("weight", "scales", "biases"):
            del tensors[f"{DOWN}.{part}"]

    folder = quantized()
    change(folder, leave_out)
    with pytest.raises(ModelError, match=f"lacks {DOWN}.weight \\(1 in all\\)"):
        require_sound(folder)
