"""Adapters against peft: the same folders, the same logits, the same scales."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pippin.errors import ModelError, UsageError
from pippin.model.adapter import (
    Base,
    adapted_linears,
    load_adapter,
    new_adapter,
    save_adapter,
)
from pippin.model.weights import Checkpoint
from pippin.recipe import Lora

peft = pytest.importorskip("peft")
torch = pytest.importorskip("torch")

Tiny = Callable[[str], Path]
TOKENS = torch.tensor([[5, 17, 3, 80, 41, 9, 60, 2]])


def _network(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _random(weights: dict[str, np.ndarray], seed: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {n: rng.normal(0, 0.1, t.shape).astype(np.float32) for n, t in weights.items()}


def _by_hand(network: Any, weights: dict[str, np.ndarray], scale: Callable[[str], float]) -> Any:
    """The logits with every update added to its weight in float64."""
    state = {n: t.double() for n, t in network.state_dict().items()}
    for name in weights:
        if name.endswith(".lora_A.weight"):
            linear = name.removesuffix(".lora_A.weight")
            a, b = (weights[f"{linear}.lora_{p}.weight"].astype(np.float64) for p in "AB")
            state[f"{linear}.weight"] += scale(linear) * torch.from_numpy(b @ a)
    network = network.double()
    network.load_state_dict(state)
    with torch.no_grad():
        return network(TOKENS).logits


@pytest.mark.torch
@pytest.mark.parametrize(
    "lora",
    [
        Lora(rank=4, alpha=12.0),
        Lora(rank=4, alpha=12.0, rslora=True, targets=("q_proj", "down_proj")),
        Lora(rank=3, alpha=3.0, targets=("model.layers.1.*",)),
    ],
    ids=["all-linear", "rslora", "pattern"],
)
def test_peft_loads_our_folder(tiny: Tiny, tmp_path: Path, lora: Lora) -> None:
    base = tiny("llama")
    linears = adapted_linears(Checkpoint(base), lora)
    weights = _random(new_adapter(linears, lora, seed=0))
    save_adapter(tmp_path, lora, weights, Base(name=str(base), digest="d"))
    theirs = peft.PeftModel.from_pretrained(_network(base), tmp_path)
    with torch.no_grad():
        logits = theirs.eval()(TOKENS).logits
    adapted = {n for n, m in theirs.named_modules() if hasattr(m, "lora_A")}
    assert adapted == {f"base_model.model.{name}" for name in linears}
    expected = _by_hand(_network(base), weights, lambda _: lora.scale)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-4)
    assert load_adapter(tmp_path).base == Base(name=str(base), digest="d")


def _peft_folder(base: Path, folder: Path, **config: Any) -> dict[str, np.ndarray]:
    network = peft.get_peft_model(_network(base), peft.LoraConfig(task_type="CAUSAL_LM", **config))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in network.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.1, generator=generator)
    network.save_pretrained(folder)
    with torch.no_grad():
        return network.eval()(TOKENS).logits


@pytest.mark.torch
@pytest.mark.parametrize(
    "config",
    [
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
        {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "use_rslora": True},
        {"r": 4, "target_modules": ["q_proj"], "layers_to_transform": [1]},
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj", "up_proj"],
            "rank_pattern": {"up_proj": 2},
            "alpha_pattern": {"layers.0.self_attn.q_proj": 20},
        },
    ],
    ids=["plain", "rslora", "one layer", "patterns"],
)
def test_we_load_pefts_folder(tiny: Tiny, tmp_path: Path, config: dict[str, Any]) -> None:
    base = tiny("llama")
    logits = _peft_folder(base, tmp_path, **config)
    adapter = load_adapter(tmp_path)
    expected = _by_hand(_network(base), adapter.weights, adapter.scale_of)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.torch
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_adapters_load(tiny: Tiny, tmp_path: Path, dtype: Any) -> None:
    from safetensors.torch import load_file as load_torch
    from safetensors.torch import save_file as save_torch

    _peft_folder(tiny("llama"), tmp_path, r=2, target_modules=["q_proj"])
    path = tmp_path / "adapter_model.safetensors"
    halves = {name: tensor.to(dtype) for name, tensor in load_torch(path).items()}
    save_torch(halves, path)
    weights = load_adapter(tmp_path).weights
    for name, tensor in halves.items():
        ours = weights[name.removeprefix("base_model.model.")]
        assert ours.dtype == np.float32
        np.testing.assert_array_equal(ours, tensor.float().numpy())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora = True, and its tensors of q_proj"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"peft_type": "IA3"}, "IA3"),
    ],
)
def test_what_cannot_be_applied_is_named(tmp_path: Path, config: dict, message: str) -> None:
    _tiny_folder(tmp_path, **config)
    with pytest.raises(ModelError, match=message):
        load_adapter(tmp_path)


def _tiny_folder(folder: Path, **config: Any) -> None:
    raw = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **config}
    (folder / "adapter_config.json").write_text(json.dumps(raw))
    tensors = {"A": np.ones((2, 8), np.float32), "B": np.ones((6, 2), np.float32)}
    named = {f"base_model.model.q_proj.lora_{n}.weight": t for n, t in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")


def test_damaged_folders(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is no adapter"):
        load_adapter(tmp_path)
    _tiny_folder(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    for name, tensor in {
        "base_model.model.q_proj.lora_A.weight": np.ones((3, 8), np.float32),
        "base_model.model.q_proj.lora_magnitude_vector": np.ones(6, np.float32),
        "base_model.model.k_proj.lora_A.weight": np.ones((2, 8), np.float32),
    }.items():
        save_file({**tensors, name: tensor}, path)
        with pytest.raises(ModelError, match=r"q_proj|k_proj"):
            load_adapter(tmp_path)
    path.unlink()
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="safetensors"):
        load_adapter(tmp_path)


def test_first_adapter_is_drawn_from_the_seed_alone(tiny: Tiny) -> None:
    linears = adapted_linears(Checkpoint(tiny("llama")), Lora(rank=4))
    first, again, other = (new_adapter(linears, Lora(rank=4), seed) for seed in (3, 3, 4))
    for name, tensor in first.items():
        np.testing.assert_array_equal(tensor, again[name])
        assert tensor.dtype == np.float32
    a_RI = first["model.layers.0.mlp.up_proj.lora_A.weight"]
    assert a_RI.shape == (4, 32)
    assert not np.array_equal(a_RI, other["model.layers.0.mlp.up_proj.lora_A.weight"])
    wide = new_adapter({"x": (4096, 8)}, Lora(rank=64), 0)["x.lora_A.weight"]
    # peft's Kaiming-uniform with a = sqrt 5: a uniform of variance 1 / (3 inputs).
    assert np.abs(wide).max() <= 4096**-0.5
    assert wide.var() == pytest.approx(1 / (3 * 4096), rel=0.02)


def test_targets(tiny: Tiny) -> None:
    checkpoint = Checkpoint(tiny("llama"))

    def chosen(*targets: str) -> list[str]:
        return list(adapted_linears(checkpoint, Lora(targets=targets)))

    every = chosen("all-linear")
    assert len(every) == 14
    assert not any("norm" in name or "embed" in name or "lm_head" in name for name in every)
    assert chosen("k_proj") == [f"model.layers.{n}.self_attn.k_proj" for n in (0, 1)]
    assert chosen("*.1.mlp.*") == [f"model.layers.1.mlp.{n}_proj" for n in ("down", "gate", "up")]
    assert chosen("lm_head") == ["lm_head"]
    shapes = adapted_linears(checkpoint, Lora(targets=("k_proj", "down_proj")))
    assert shapes["model.layers.0.self_attn.k_proj"] == (32, 16)
    assert shapes["model.layers.0.mlp.down_proj"] == (48, 32)


def test_unknown_target_lists_the_linears(tiny: Tiny) -> None:
    with pytest.raises(UsageError, match="'qproj'") as caught:
        adapted_linears(Checkpoint(tiny("llama")), Lora(targets=("qproj",)))
    assert "did you mean q_proj?" in caught.value.hint
    assert "down_proj, gate_proj" in caught.value.hint
