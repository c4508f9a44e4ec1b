"""A Hugging Face folder holds the codes where compressed-tensors can, and loads in transformers."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tests.targets.tiny_quantized import CHANNEL, KINDS, LINEAR

from pippin.engines import Sampling
from pippin.events import Notice
from pippin.model.quantized import DenseView
from pippin.quantizers import Grid
from pippin.targets import Bundle, load_target
from pippin.targets.agreement import load_parent

torch = pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.torch
PROMPT = np.array([5, 6, 7, 250, 9], np.int32)


def deploy(quantized):
    folder = quantized.parent / "bundle"
    folder.mkdir()
    bundle = Bundle(quantized=quantized, folder=folder, context=64)
    events = list(load_target("hf").write(bundle))
    return folder, [event.text for event in events if isinstance(event, Notice)]


@pytest.mark.parametrize("kind", [*sorted(KINDS), "gemma3"])
def test_transformers_loads_what_the_quantized_model_computes(quantized, kind):
    folder = quantized(kind)
    bundle, _ = deploy(folder)
    found, expected = load_target("hf").load(bundle), load_parent(folder)
    # The embedding is dense: its codes were rounded to the scales' dtype.
    np.testing.assert_allclose(
        found.logprobs(PROMPT[None]), expected.logprobs(PROMPT[None]), atol=0.3
    )
    assert len(list(found.generate([PROMPT], Sampling(max_tokens=4)))) == 4


def test_linears_that_transformers_cannot_load_packed_are_dense(quantized, monkeypatch):
    """Mamba 2 sets first values of a linear's weight before a file is read."""
    shape = {"num_heads": 8, "state_size": 16, "n_groups": 1, "chunk_size": 4}
    monkeypatch.setitem(KINDS, "mamba2", ("Mamba2Config", shape))
    folder = quantized("mamba2", lambda module: LINEAR if "_proj" in module else None)
    bundle, notices = deploy(folder)
    assert notices[:1] == ["hf: 4 quantized tensors are stored dense, in the model's dtype"]
    found, expected = load_target("hf").load(bundle), load_parent(folder)
    np.testing.assert_allclose(
        found.logprobs(PROMPT[None]), expected.logprobs(PROMPT[None]), atol=0.3
    )


@pytest.mark.parametrize("grid", [LINEAR, CHANNEL], ids=["4 bits", "8 bits"])
def test_compressed_tensors_unpacks_our_values(quantized, grid):
    """Its own decompressor gives the quantized folder's weights, bit for bit."""
    folder = quantized("qwen2", lambda module: grid)
    bundle, notices = deploy(folder)
    model = load_target("hf").load(bundle)
    model.logprobs(PROMPT[None])  # the first call unpacks
    view = DenseView(folder)
    found = dict(model.network.named_parameters())
    for i, part in ((0, "self_attn.k_proj"), (1, "mlp.down_proj")):
        name = f"model.layers.{i}.{part}.weight"
        np.testing.assert_array_equal(found[name].numpy(), view.read(name), err_msg=name)
    assert notices[:1] == ["hf: 1 quantized tensors are stored dense, in the model's dtype"]
    description = json.loads((bundle / "deploy.json").read_text())
    assert (description["packed"], description["expanded"]) == (14, 1)


def test_codes_that_it_does_not_hold_are_dense(quantized):
    folder = quantized("llama", lambda module: Grid(bits=4, group_size=32, symmetric=False))
    bundle, notices = deploy(folder)
    assert notices[:1] == ["hf: 15 quantized tensors are stored dense, in the model's dtype"]
    assert "quantization_config" not in json.loads((bundle / "config.json").read_text())
    description = json.loads((bundle / "deploy.json").read_text())
    assert description["check"]["mean_kl"] < 0.02
    assert "rounded to its dtype" in (bundle / "README.md").read_text()


def test_the_readme_s_program_answers(quantized, monkeypatch, capsys):
    bundle, _ = deploy(quantized())
    monkeypatch.chdir(bundle)
    (program,) = re.findall(r"```python\n(.*?)```", Path("README.md").read_text(), re.DOTALL)
    exec(program.replace("max_new_tokens=64", "max_new_tokens=3"), {})
    assert "'role': 'assistant'" in capsys.readouterr().out


def test_linears_of_several_widths_are_named_in_groups(quantized):
    def choose(module):
        return CHANNEL if module.endswith(("down_proj", "embed_tokens")) else LINEAR

    bundle, _ = deploy(quantized("llama", choose))
    groups = json.loads((bundle / "config.json").read_text())["quantization_config"][
        "config_groups"
    ]
    assert [g["weights"]["num_bits"] for g in groups.values()] == [4, 8]
    assert len(groups["group_1"]["targets"]) == 2


def test_no_library_reports_its_progress(quantized, capfd):
    folder = quantized()
    bundle = Bundle(quantized=folder, folder=folder.parent / "quiet", context=64)
    bundle.folder.mkdir()
    target = load_target("hf")
    list(target.write(bundle))
    target.load(bundle.folder)
    assert capfd.readouterr() == ("", "")
