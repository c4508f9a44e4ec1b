"""An MLX folder holds the quantized tensors and computes the same in mlx-lm as torch does."""

import json
import shutil

import numpy as np
import pytest
from tests.targets.tiny_quantized import KINDS, LINEAR

from pippin.engines import Sampling
from pippin.errors import ModelError
from pippin.model.weights import Checkpoint
from pippin.quantizers import Grid
from pippin.recipe import Quantize
from pippin.targets import Bundle, load_target
from pippin.targets.agreement import load_parent

pytest.importorskip("torch")
mlx_lm = pytest.importorskip("mlx_lm")
pytestmark = [pytest.mark.torch, pytest.mark.mlx]
PROMPT = np.array([5, 6, 7, 250, 9], np.int32)


def deploy(quantized):
    folder = quantized.parent / "bundle"
    folder.mkdir()
    list(load_target("mlx").write(Bundle(quantized=quantized, folder=folder, context=64)))
    return folder


@pytest.mark.parametrize("kind", [*sorted(KINDS), "gemma3"])
def test_mlx_lm_itself_computes_what_torch_does(quantized, kind):
    import mlx.core as mx
    from mlx_lm.utils import load_model

    folder = quantized(kind)
    network, _ = load_model(deploy(folder))
    network.set_dtype(mx.float32)
    logits = network(mx.array(PROMPT[None].astype(np.int64)))
    found = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))[0]
    expected = load_parent(folder).topk(PROMPT[None], 320)
    found = np.take_along_axis(found, expected.ids_BTK[0], -1)
    # mlx-lm rounds Gemma's embedding scale to bfloat16.
    np.testing.assert_allclose(
        found, expected.logprobs_BTK[0], atol=0.1 if kind == "gemma3" else 1e-3
    )


@pytest.mark.parametrize(
    "grid", [LINEAR, Grid(bits=3, group_size=32, symmetric=False)], ids=["symmetric", "affine"]
)
def test_tensors_are_the_quantized_ones(quantized, grid):
    folder = quantized("llama", lambda module: grid)
    bundle = deploy(folder)
    found, expected = Checkpoint(bundle), Checkpoint(folder)
    assert found.tensors.keys() == expected.tensors.keys()
    for name in expected.tensors:
        np.testing.assert_array_equal(found.read(name), expected.read(name))


def test_rope_stands_where_mlx_lm_looks(quantized):
    found = json.loads((deploy(quantized("llama3_rope")) / "config.json").read_text())
    assert found["rope_theta"] == 1e4
    assert found["rope_scaling"]["rope_type"] == "llama3"


def test_the_scorer_answers_from_the_folder(quantized):
    folder = quantized()
    bundle = deploy(folder)
    found, expected = load_target("mlx").load(bundle), load_parent(folder)
    np.testing.assert_allclose(
        found.logprobs(PROMPT[None]), expected.logprobs(PROMPT[None]), atol=1e-4
    )
    greedy = Sampling(max_tokens=8)
    assert list(found.generate([PROMPT], greedy)) == list(expected.generate([PROMPT], greedy))
    description = json.loads((bundle / "deploy.json").read_text())
    assert description["target"] == "mlx"
    assert description["check"]["mean_kl"] < 1e-4
    assert "mlx_lm.generate --model ." in (bundle / "README.md").read_text()


def test_an_altered_tokenizer_is_refused(quantized, tmp_path):
    copy = shutil.copytree(deploy(quantized()), tmp_path / "copy")
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json is not the file"):
        load_target("mlx").load(copy)


def test_a_family_that_was_not_compared_is_refused(quantized):
    folder = quantized()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mamba2"}))
    assert "model type mamba2" in load_target("mlx").refusal(Quantize(), folder)[0]
