"""What ExecuTorch cannot hold is refused before any work, with the reason and the way out."""

import json
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from pippin.recipe import Data, Deploy, Model, Quantize, Recipe
from pippin.stages.sharing import offered_grids
from pippin.targets import TARGETS, load_target

GOOD = Quantize(
    bits=4,
    group_size=32,
    scheme="symmetric",
    embed_bits=8,
    embed_group_size=0,
    embed_scheme="symmetric",
)


@pytest.fixture
def checkpoint(tmp_path):
    def make(dtype=ml_dtypes.bfloat16, **changes):
        linear = {"model.layers.0.self_attn.q_proj.weight": np.zeros((64, 64), dtype)}
        save_file(linear, tmp_path / "model.safetensors")
        config = {
            "model_type": "llama",
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "vocab_size": 320,
            "tie_word_embeddings": True,
        }
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        return tmp_path

    return make


@pytest.mark.parametrize("target", TARGETS)
def test_a_recipe_that_says_nothing_of_codes_fits_every_target(checkpoint, target):
    assert load_target(target).refusal(Quantize(), checkpoint()) is None


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"group_size": 128},
        {"group_size": 0},
        {"bits": 8, "group_size": 0},
        {"embed_bits": 4, "embed_group_size": 32},
        {"embed_bits": 16, "embed_scheme": "affine", "embed_group_size": 64},
    ],
)
def test_what_fits_is_not_refused(checkpoint, changes):
    assert load_target("executorch").refusal(replace(GOOD, **changes), checkpoint()) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheme": "affine"}, "symmetric codes"),
        ({"bits": 3}, "no 3-bit linear"),
        ({"bits": 8}, "one scale a channel"),
        ({"embed_scheme": "affine"}, "embedding holds symmetric"),
        ({"embed_bits": 6}, "4, 8 or 16 bits"),
        ({"embed_group_size": 64}, "tied head"),
    ],
)
def test_codes_that_do_not_fit_are_refused(checkpoint, changes, message):
    refusal = load_target("executorch").refusal(replace(GOOD, **changes), checkpoint())
    assert message in refusal[0]
    assert "quantize." in refusal[1]


def test_a_budget_offers_both_widths_each_with_the_scales_it_needs(checkpoint):
    asked = Recipe(
        model=Model(source="-"),
        data=Data(source="-"),
        quantize=replace(GOOD, target_bits=5.0),
        deploy=Deploy(targets=("executorch",), context=64),
    )
    folder = checkpoint()
    assert load_target("executorch").refusal(asked.quantize, folder) is None
    assert offered_grids(asked, folder) == [{"bits": 4}, {"bits": 8, "per_channel": True}]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "caps its attention scores"),
        ({"model_type": "mamba2"}, "model type mamba2"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope type dynamic"),
        ({"hidden_act": "gelu"}, "activation gelu"),
        ({"attention_multiplier": 0.2, "model_type": "granite"}, "model type granite"),
    ],
)
def test_models_that_are_not_built_are_refused(checkpoint, changes, message):
    assert message in load_target("executorch").refusal(GOOD, checkpoint(**changes))[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "gemma3_text", "sliding_window": 512},
        {"model_type": "mistral", "sliding_window": 512},
    ],
)
def test_windows_are_refused_where_nothing_masks_them(checkpoint, changes):
    folder, asked = checkpoint(**changes), replace(GOOD)
    assert load_target("executorch").refusal(asked, folder) is None
    refusal = load_target("executorch-vulkan").refusal(asked, folder)
    assert "sliding-window attention (512" in refusal[0]


def test_a_window_that_no_layer_uses_is_no_reason(checkpoint):
    unused = {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}
    assert load_target("executorch").refusal(GOOD, checkpoint(**unused)) is None
    full = {"model_type": "qwen3", "sliding_window": 64, "layer_types": ["full_attention"] * 2}
    assert load_target("executorch").refusal(GOOD, checkpoint(**full)) is None


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_scales_that_would_be_rounded_are_refused_before_training(checkpoint, dtype):
    target, folder = load_target("executorch"), checkpoint(dtype=dtype)
    message, hint = target.refusal(GOOD, folder)
    assert f"so its scales are {np.dtype(dtype).name}" in message
    assert "quantize.bits = 8 and quantize.group_size = 0" in hint
    assert target.refusal(replace(GOOD, bits=8, group_size=0), folder) is None
