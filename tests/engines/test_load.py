"""What loads, what is refused and with which words, and what a device is called."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pippin.engines import load_engine
from pippin.engines.torch import device, load
from pippin.errors import ModelError, UsageError

pytestmark = pytest.mark.torch


@pytest.fixture
def copy(tiny, tmp_path):
    """A copy of the tiny Llama whose tensors or config a test changes."""

    def make(kind="llama", tensors=None, config=None):
        folder = tmp_path / kind
        shutil.copytree(tiny(kind), folder)
        if tensors is not None:
            path = folder / "model.safetensors"
            save_file(tensors(load_file(path)), path, metadata={"format": "pt"})
        if config is not None:
            path = folder / "config.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
        return folder

    return make


def without(name):
    return lambda tensors: {k: v for k, v in tensors.items() if k != name}


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_keep_their_values_in_the_asked_dtype(copy, engine, dtype, kept, monkeypatch):
    monkeypatch.setattr(load, "PIECE_BYTES", 1000)
    folder = copy(tensors=lambda tensors: {name: x.to(kept) for name, x in tensors.items()})
    network = engine.load(folder, dtype).network
    stored = load_file(folder / "model.safetensors")
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, stored[name].to(getattr(torch, dtype))), name
    assert not any(p.requires_grad for p in network.parameters())
    assert not network.training


def test_tied_heads_stay_tied(tiny, engine):
    network = engine.load(tiny("llama_tied"), "bfloat16").network
    assert network.lm_head.weight is network.model.embed_tokens.weight


def test_a_missing_tensor_is_an_error_not_a_random_weight(copy, engine):
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ModelError, match=rf"lacks {name} \(1 in all\)"):
        engine.load(copy(tensors=without(name)), "float32")


def test_a_tensor_of_another_shape_is_an_error(copy, engine):
    def narrow(tensors):
        name = "model.layers.0.mlp.up_proj.weight"
        return {**tensors, name: tensors[name][:4].clone()}

    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp\.up_proj"):
        engine.load(copy(tensors=narrow), "float32")


def test_a_tensor_nobody_knows_is_an_error(copy, engine):
    extra = lambda tensors: {**tensors, "model.layers.0.extra.weight": torch.zeros(2)}  # noqa: E731
    with pytest.raises(ModelError, match=r"does not know: model\.layers\.0\.extra\.weight"):
        engine.load(copy(tensors=extra), "float32")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "never_heard_of"}, "cannot read its config.json"),
        ({"model_type": "vit"}, "vit is not a causal language model"),
    ],
)
def test_other_architectures_are_refused(copy, engine, config, words):
    with pytest.raises(ModelError, match=words):
        engine.load(copy(config=config), "float32")


def test_folders_without_config_or_safetensors_are_refused(copy, engine, tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        engine.load(tmp_path, "float32")
    folder = copy()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        engine.load(folder, "float32")


def test_a_truncated_file_is_refused(copy, engine):
    folder = copy()
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="its header describes"):
        engine.load(folder, "float32")


def test_a_quantized_folder_loads_dequantized(copy, engine):
    """MLX's affine layout, written here by hand: w = code x scale + bias."""
    rng, name = np.random.default_rng(0), "model.layers.0.self_attn.q_proj"
    codes = rng.integers(0, 256, (32, 32)).astype(np.uint8)
    scales = rng.uniform(0.01, 0.02, (32, 1)).astype(np.float32)
    biases = -128 * scales
    dense = codes * scales + biases

    def quantized(tensors):
        return {
            **tensors,
            f"{name}.weight": torch.from_numpy(codes.view(np.uint32).astype(np.uint32)),
            f"{name}.scales": torch.from_numpy(scales),
            f"{name}.biases": torch.from_numpy(biases),
        }

    setting = {"group_size": 32, "bits": 8}
    folder = copy(
        tensors=quantized, config={"quantization": setting, "quantization_config": setting}
    )
    weight = engine.load(folder, "float32").network.get_submodule(name).weight
    np.testing.assert_allclose(weight.numpy(), dense, rtol=1e-6)


def test_a_device_that_is_not_here_is_named_with_those_that_are(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UsageError, match="device mps is not available") as error:
        load_engine("torch", "mps")
    assert "cpu" in error.value.hint


def test_auto_picks_the_best_device_and_its_dtype(monkeypatch):
    cpu, mps = torch.device("cpu"), torch.device("mps")
    monkeypatch.setattr(device, "available", lambda: ["mps", "cpu"])
    assert device.pick_device("auto") == mps
    assert device.pick_dtype("auto", mps) is torch.bfloat16
    monkeypatch.setattr(device, "native_bfloat16", lambda _: False)
    assert device.pick_dtype("auto", cpu) is torch.float32
    with pytest.raises(UsageError, match="float64 does not exist on mps"):
        device.pick_dtype("float64", mps)


def test_device_and_memory_in_plain_figures(engine):
    count = device.cores()
    assert engine.device() == f"cpu ({count} core{'s' if count > 1 else ''})"
    assert 50e6 < engine.peak_memory() < 1e12


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_in_the_folder_runs_only_when_told(copy, tiny, engine, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    folder = copy(config={"model_type": "own", "auto_map": names})
    (folder / "own.py").write_text(OWN_CODE)
    tokens_BT = np.arange(12, dtype=np.int32).reshape(2, 6)
    with pytest.raises(ModelError, match=r"cannot read its config\.json"):
        engine.load(folder, "float32")
    model = load_engine("torch", "cpu", remote_code=True).load(folder, "float32")
    assert type(model.network).__name__ == "OwnForCausalLM"
    plain = engine.load(tiny("llama"), "float32")
    np.testing.assert_array_equal(model.logprobs(tokens_BT), plain.logprobs(tokens_BT))


@pytest.mark.parametrize("set_by", [{"RANK": "1", "WORLD_SIZE": "2"}, {"MLX_RANK": "1"}])
def test_one_of_several_processes_is_refused(set_by, monkeypatch):
    for name, value in set_by.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="number 1 of several"):
        load_engine("torch", "cpu")
    for name in set_by:
        monkeypatch.setenv(name, "")
    load_engine("torch", "cpu")
