"""A tiny model end to end: quantized folder to .mlpackage, read back and run in numpy."""

import json
from dataclasses import replace

import numpy as np
import pytest
from tests.targets.tiny_quantized import CHANNEL, LINEAR, write_folder

from pippin.engines import Sampling
from pippin.errors import ModelError, PippinError
from pippin.events import Notice
from pippin.model.quantized import DenseView
from pippin.quantizers import Grid
from pippin.recipe import Quantize
from pippin.targets import Bundle, load_target
from pippin.targets.agreement import load_parent

torch = pytest.importorskip("torch")
pytest.importorskip("coremltools")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.coreml,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
TARGET, CONTEXT = "coreml", 64
SLOW_KINDS = ("gemma2", "llama3_rope", "mistral", "odd_heads", "openllama", "qwen2", "untied")
PROMPT = np.array([5, 6, 7, 250, 9], np.int32)


def test_the_program_computes_what_torch_does(model, source):
    parent = load_parent(source)
    found, expected = model.logprobs(PROMPT[None]), parent.logprobs(PROMPT[None])
    np.testing.assert_allclose(found, expected, atol=0.05)
    greedy = Sampling(max_tokens=8)
    assert list(model.generate([PROMPT], greedy)) == list(parent.generate([PROMPT], greedy))


def test_decode_continues_prefill(model):
    steps = model.logits(PROMPT)
    np.testing.assert_allclose(model.last_logits(PROMPT, 0), steps[-1], atol=0.05)


def test_the_last_slot_of_the_context_is_used(model):
    row = np.arange(CONTEXT, dtype=np.int32)
    assert len(list(model.generate([row], Sampling(max_tokens=5)))) == 1
    with pytest.raises(ModelError, match=f"context of {CONTEXT}"):
        model.last_logits(np.zeros(CONTEXT + 1, np.int32), 0)


def test_weights_are_stored_once_as_our_values(bundle, source, model):
    """Fourteen linears, and one matrix for embedding and tied head."""
    stored = {matrix.shape: matrix for matrix in model.matrices()}
    expected = DenseView(source).read("model.embed_tokens.weight")
    np.testing.assert_array_equal(stored[expected.shape], expected)
    found = json.loads((bundle / "deploy.json").read_text())
    assert found["stored"] == 15
    assert found["check"]["mean_kl"] < 1e-3
    assert "Core ML itself was not run" in found["runtime"]
    assert "model.makeState()" in (bundle / "README.md").read_text()


def test_large_activations_do_not_overflow(tmp_path):
    """Squares of elements beyond 256 are no float16."""
    from pippin.targets.coreml.parts import HalfNorm
    from pippin.targets.portable import RMSNorm

    x_BTD, weight_D = torch.randn(1, 3, 64) * 3000, torch.rand(64) + 0.5
    found = HalfNorm(weight_D.half(), 1e-5)(x_BTD.half()).float()
    torch.testing.assert_close(found, RMSNorm(weight_D, 1e-5)(x_BTD), rtol=0.02, atol=0.02)
    assert not RMSNorm(weight_D.half(), 1e-5)(x_BTD.half()).any()


@pytest.mark.slow
def test_what_overflows_is_named_and_computed_in_float32(quantized, tmp_path):
    """A residual stream beyond 65,504, as some large models have it."""
    from safetensors.numpy import load_file, save_file

    folder = quantized("untied", lambda module: None)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.weight"] *= 300
    tensors["model.layers.0.mlp.down_proj.weight"] *= 3e4
    save_file(tensors, path, metadata={"format": "pt"})
    (tmp_path / "made").mkdir()
    bundle = Bundle(quantized=folder, folder=tmp_path / "made", context=CONTEXT)
    events = list(load_target(TARGET).write(bundle))
    said = [event.text for event in events if isinstance(event, Notice)]
    assert any("float16 does not hold" in text for text in said), said
    found = json.loads((tmp_path / "made" / "deploy.json").read_text())
    assert found["check"]["top1"] > 0.95
    assert found["float32"]


def test_what_overflows_later_is_an_error(bundle):
    model = load_target(TARGET).load(bundle)
    for matrix in model.matrices():
        matrix[:] = 1e6
    with pytest.raises(ModelError, match="float16 does not hold the values of"):
        model.last_logits(PROMPT, 0)


@pytest.mark.parametrize(
    "kind",
    ["qwen3", "gemma3_short"] + [pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW_KINDS],
)
def test_other_families(deploy, quantized, tmp_path, kind):
    bundle = deploy(quantized(kind, lambda module: LINEAR), tmp_path / "made")
    assert json.loads((bundle / "deploy.json").read_text())["check"]["mean_kl"] < 1e-3


def test_other_weights_are_found(model, tmp_path):
    from pippin.targets.coreml.writing import _require_stored
    from pippin.targets.folder import Folder

    other = write_folder(tmp_path, "llama", lambda module: CHANNEL)
    with pytest.raises(PippinError, match=r"28 of 15 matrices"):
        _require_stored(model, Folder(other), DenseView(other))


def test_codes_that_do_not_fit_are_an_error(deploy, quantized, tmp_path):
    folder = quantized("llama", lambda module: Grid(bits=4, group_size=32, symmetric=False))
    with pytest.raises(ModelError, match="4-bit affine codes, Core ML holds symmetric"):
        deploy(folder, tmp_path / "made")


GOOD = Quantize(scheme="symmetric", embed_scheme="symmetric")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"embed_bits": 16, "embed_scheme": "affine"}, None),
        ({"bits": 3}, "not 3"),
        ({"scheme": "affine"}, "linears have symmetric codes"),
        ({"embed_scheme": "affine"}, "embedding have symmetric codes"),
    ],
)
def test_codes_are_asked_about_before_any_work(quantized, changes, message):
    refusal = load_target(TARGET).refusal(replace(GOOD, **changes), quantized())
    assert refusal is None if message is None else message in refusal[0]
