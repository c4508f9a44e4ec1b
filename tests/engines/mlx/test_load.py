"""What loads, what is refused, and that a quantized folder means the same everywhere."""

import ctypes
import functools
import json
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pippin.engines.mlx import blas, parity
from pippin.errors import ModelError, UsageError
from pippin.model.config import shrunk, with_rope_keys
from pippin.model.quantized_floats import MODES
from pippin.recipe import Train

pytestmark = pytest.mark.mlx

TOKENS = np.random.default_rng(1).integers(3, 97, (2, 12)).astype(np.int32)


@pytest.fixture
def copy(tiny, tmp_path):
    """A tiny model's folder to change: kind, keys of its config."""

    def make(kind, **keys):
        target = tmp_path / kind
        target.mkdir()
        for path in tiny(kind).iterdir():
            (target / path.name).write_bytes(path.read_bytes())
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps(config | keys))
        return target

    return make


def test_a_rope_that_is_not_read_is_refused(engine, copy, monkeypatch):
    """With mlx-lm left to itself, which takes a theta of 10000."""
    folder = copy("llama", rope_parameters={"rope_theta": 3e5, "rope_type": "default"})
    monkeypatch.setenv("PIPPIN_CACHE", str(folder / "first"))
    parity.check(folder)
    assert len(list((folder / "first" / "mlx-parity").iterdir())) == 1
    monkeypatch.setattr("pippin.engines.mlx.load.with_rope_keys", lambda raw: raw)
    parity._limit.cache_clear()
    engine.load(folder, "float32")  # what was found is kept
    monkeypatch.setenv("PIPPIN_CACHE", str(folder / "second"))
    parity._limit.cache_clear()
    with pytest.raises(ModelError, match="computes llama with this config"):
        engine.load(folder, "float32")
    parity._limit.cache_clear()


@pytest.mark.parametrize(("kind", "longest"), [("llama", None), ("gemma3", 4)])
def test_without_pytorch_a_run_is_told_what_was_not_compared(
    engine, copy, monkeypatch, kind, longest
):
    """Unless it was once: the answer serves where PyTorch is gone again."""
    folder = copy(kind)
    monkeypatch.setenv("PIPPIN_CACHE", str(folder / "cache"))
    parity._limit.cache_clear()
    with monkeypatch.context() as bare:
        bare.setitem(sys.modules, "torch", None)
        loaded = engine.load(folder, "float32").loaded
    assert "not compared with transformers': PyTorch is not installed" in loaded.notices[-1]
    assert loaded.longest == longest
    parity._limit.cache_clear()
    parity.check(folder)
    parity._limit.cache_clear()
    monkeypatch.setitem(sys.modules, "torch", None)
    assert parity.notice(folder) is None
    parity._limit.cache_clear()


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
         "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
         "original_max_position_embeddings": 32},
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_stretched_ropes(engine, reference, copy, rope):
    folder = copy("llama", rope_parameters=rope)
    ours, wanted = (e.load(folder, "float32").logprobs(TOKENS) for e in (engine, reference))
    np.testing.assert_allclose(ours, wanted, atol=2e-5)


def test_an_exact_embedding_scale(engine, reference, copy):
    """sqrt(1088) is no bfloat16: rounded, the logits of Gemma 3 are off by a hundred times this."""
    folder = copy("gemma3")
    network = engine.load(folder, "float32").network
    embed = network["model"]["embed_tokens"]
    assert type(embed).__name__ == "ScaledEmbedding"
    ours, wanted = (e.load(folder, "float32").logprobs(TOKENS) for e in (engine, reference))
    np.testing.assert_allclose(ours, wanted, atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "message"),
    [("gpt_oss", "does not load it: .*not in model"), ("mamba2", "cannot be compared with")],
)
def test_architectures_that_do_not_work(engine, tiny, kind, message):
    with pytest.raises(ModelError, match=message) as caught:
        engine.load(tiny(kind), "float32")
    assert "torch" in caught.value.hint


@pytest.mark.parametrize("kind", ["gemma2", "mistral"])
def test_a_window_that_is_left_out(engine, reference, tiny, kind):
    """Exact up to the window's four tokens, refused beyond."""
    model = engine.load(tiny(kind), "float32")
    wanted = reference.load(tiny(kind), "float32").logprobs(TOKENS[:, :4])
    np.testing.assert_allclose(model.logprobs(TOKENS[:, :4]), wanted, atol=2e-5)
    for ask in (lambda: model.logprobs(TOKENS), lambda: model.topk(TOKENS, 3)):
        with pytest.raises(ModelError, match="12 tokens exceed the attention window of 4"):
            ask()


def test_folders_that_are_no_models(engine, copy, tmp_path):
    with pytest.raises(ModelError, match="has no config"):
        engine.load(tmp_path, "float32")
    folder = copy("llama")
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="does not load it: Missing 1 parameters"):
        engine.load(folder, "float32")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no model\*\.safetensors"):
        engine.load(folder, "float32")


@pytest.fixture(params=[True, False], ids=["codes", "dense"])
def codes(request, monkeypatch):
    """Both ways to compute with a quantized folder; a CPU takes the dense one by itself."""
    from pippin.engines.mlx import load

    if request.param:
        monkeypatch.setattr(load, "keeps_codes", lambda: True)
    return request.param


@pytest.mark.parametrize("kind", [2, 3, 4, 5, 6, 8, *MODES])
def test_quantized_folders(engine, reference, tiny, tmp_path, kind, codes):
    """Our layout as mlx-lm reads it, against its dense meaning in PyTorch; embeddings too."""
    folder = quantized(tiny("llama_tied"), tmp_path, kind)
    ours, wanted = (e.load(folder, "float32") for e in (engine, reference))
    assert codes == any("scales" in module for _, module in ours.network.named_modules())
    np.testing.assert_allclose(ours.logprobs(TOKENS), wanted.logprobs(TOKENS), atol=3e-5)


@pytest.mark.parametrize("kind", [4, "nvfp4"])
def test_adapters_train_on_a_quantized_base(
    engine, reference, tiny, tmp_path, adapter, pack, samples, codes, kind
):
    """Losses are those of PyTorch on the dequantized base."""
    from pippin.recipe import Lora

    folder = quantized(tiny("llama"), tmp_path, kind)
    lora, first = Lora(rank=4, alpha=8), adapter(tiny("llama"))
    trainers = [
        e.load(folder, "float32").trainer(Train(), lora, first, 0) for e in (engine, reference)
    ]
    for _ in range(10):
        ours, wanted = (trainer.step([pack([samples])], 1e-2) for trainer in trainers)
        assert ours.loss_sum / ours.tokens == pytest.approx(
            wanted.loss_sum / wanted.tokens, abs=1e-4
        )
    with pytest.raises(ModelError, match="its codes cannot be trained"):
        engine.load(folder, "float32").trainer(Train(), None, {}, 0)


def quantized(folder, target, kind):
    """The folder as MLX writes it, embedding included: bits in groups of 32, or a mode's name."""
    import mlx.core as mx

    floats = MODES.get(kind)
    quantization = {"bits": kind, "group_size": 32}
    if floats:
        quantization = {"bits": floats.bits, "group_size": floats.group_size, "mode": kind}
    config = json.loads((folder / "config.json").read_text())
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            parts = mx.quantize(mx.array(tensor), **quantization)
            for part, array in zip(("weight", "scales", "biases"), parts, strict=False):
                tensors[name.removesuffix("weight") + part] = np.array(array)
        else:
            tensors[name] = tensor
    save_file(tensors, target / "model.safetensors", {"format": "mlx"})
    (target / "config.json").write_text(json.dumps(config | {"quantization": quantization}))
    return target


def test_what_the_device_is_called(engine):
    from pippin.engines import load_engine

    assert engine.device().startswith("cpu (")
    assert (engine.dtype("auto"), engine.dtype("bfloat16")) == ("float32", "bfloat16")
    with pytest.raises(UsageError, match="dtype int8 does not exist in MLX"):
        engine.dtype("int8")
    with pytest.raises(UsageError, match="device cuda is not available to MLX"):
        load_engine("mlx", "cuda")


@pytest.mark.skipif(sys.platform != "linux", reason="Apple's own BLAS is fast")
@pytest.mark.parametrize("found", [True, False])
def test_openblas_is_preloaded_or_asked_for(monkeypatch, found):
    asked = []

    def load(name, mode):
        asked.append((name, mode))
        if not found:
            raise OSError

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.delitem(sys.modules, "mlx.core")
    blas._load.cache_clear()
    blas.preload()
    told = blas.notice()
    blas._load.cache_clear()
    assert asked[0] == ("libopenblas.so.0", ctypes.RTLD_GLOBAL)
    assert told is None if found else "apt install libopenblas0-pthread" in told


@pytest.mark.skipif(sys.platform != "linux", reason="Apple's own BLAS is fast")
def test_openblas_that_comes_too_late_is_told(monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setattr(blas, "_load", functools.cache(blas._load.__wrapped__))
    blas.preload()  # MLX is there already
    assert "imported before pippin could load OpenBLAS" in blas.notice()


def test_configs_with_a_rope_for_each_kind_of_layer():
    raw = {
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }
    changed = with_rope_keys({"text_config": raw})["text_config"]
    assert (changed["rope_theta"], changed["rope_local_base_freq"]) == (1e6, 1e4)
    assert changed["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert changed["sliding_window_pattern"] == 6


def test_a_small_config_keeps_every_kind_of_layer():
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    small = shrunk({"num_hidden_layers": 26, "layer_types": kinds * 4, "hidden_size": 1152}, 128)
    assert small["num_hidden_layers"] == 6
    assert small["layer_types"] == kinds
    assert (small["hidden_size"], small["vocab_size"]) == (1152, 128)


def test_models_with_other_towers(engine, copy):
    with pytest.raises(ModelError, match="takes text models, llama has other towers"):
        engine.load(copy("llama", text_config={}), "float32")
