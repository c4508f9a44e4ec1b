"""Merging: equal to peft's own merge and to the adapter, in the memory of one tensor."""

import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.tiny_runs import quantize_folder, write_rows, write_speaking_model

from pippin import artifact
from pippin.artifact import Origin
from pippin.engines import load_engine
from pippin.errors import ModelError
from pippin.events import Event, Finished, Notice, Progress
from pippin.job import Job
from pippin.model.adapter import Base, adapted_linears, new_adapter, save_adapter
from pippin.model.quantized import DenseView, dense_tensors
from pippin.model.weights import Checkpoint, Writer
from pippin.recipe import Data, Lora, Model, Quantize, Recipe
from pippin.stages.merge import merge
from pippin.stages.quantize import quantize

peft = pytest.importorskip("peft")
torch = pytest.importorskip("torch")

Tiny = Callable[[str], Path]
TOKENS = torch.tensor([[5, 17, 3, 80, 41, 9, 60, 2]])


def _merge(base: Path, adapter: Path, folder: Path, digest: str = "", **more: Path) -> list[Event]:
    recipe = Recipe(model=Model(source=str(base)), data=Data(source="rows.jsonl"))
    origin = Origin(stage="merge", inputs={"model": digest}, settings={}, versions={})
    job = Job(
        stage="merge",
        recipe=recipe,
        inputs={"model": base, "adapter": adapter, **more},
        folder=folder,
        origin=origin,
    )
    return list(merge(job))


def _network(folder: Path, dtype: Any = torch.float32) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def _logits(network: Any) -> Any:
    with torch.no_grad():
        return network(TOKENS).logits.float()


def _peft(base: Path, folder: Path, dtype: Any, **config: Any) -> Any:
    network = _network(base, dtype)
    network = peft.get_peft_model(network, peft.LoraConfig(task_type="CAUSAL_LM", **config)).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in network.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.1, generator=generator)
    network.save_pretrained(folder)
    return network


def _speaks_like(tuned: Any, base: Path, adapter: Path) -> None:
    """The engine with the adapter on top gives peft's own distribution."""
    model = load_engine("torch", "cpu").load(base, "float32", adapter)
    ours = model.topk(TOKENS.numpy().astype(np.int32), 97)
    wanted = _logits(tuned).log_softmax(-1).numpy()
    picked = np.take_along_axis(wanted, ours.ids_BTK.astype(int), -1)
    np.testing.assert_allclose(ours.logprobs_BTK, picked, atol=1e-4)


def _in_dtype(model: Path, folder: Path, dtype: Any) -> Path:
    _network(model, dtype).save_pretrained(folder)
    return folder


CONFIGS = {
    "one linear": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]},
    "all-linear": {"r": 4, "lora_alpha": 12, "target_modules": "all-linear"},
    "rslora": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["up_proj", "v_proj"],
        "use_rslora": True,
    },
    "dora": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"], "use_dora": True},
    "patterns": {
        "r": 4,
        "target_modules": ["q_proj", "down_proj"],
        "rank_pattern": {"down_proj": 2},
        "alpha_pattern": {"q_proj": 30},
    },
}


@pytest.mark.torch
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_equals_pefts_merge_and_the_adapter(
    tiny: Tiny, tmp_path: Path, config: dict[str, Any]
) -> None:
    base = tiny("llama")
    tuned = _peft(base, tmp_path / "adapter", torch.float32, **config)
    events = _merge(base, tmp_path / "adapter", tmp_path / "merge")
    ours = _logits(_network(tmp_path / "merge"))
    torch.testing.assert_close(ours, _logits(tuned), rtol=1e-4, atol=1e-4)
    theirs = tuned.merge_and_unload().state_dict()
    for name, tensor in _network(tmp_path / "merge").state_dict().items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(ours, _logits(_network(base)), atol=1e-2)
    done = [event.done for event in events if isinstance(event, Progress)]
    assert done == list(range(1, len(Checkpoint(base).tensors) + 1))
    assert isinstance(events[-1], Finished)


@pytest.mark.torch
def test_bfloat16_is_rounded_once(tiny: Tiny, tmp_path: Path) -> None:
    base = _in_dtype(tiny("llama"), tmp_path / "base", torch.bfloat16)
    tuned = _peft(base, tmp_path / "adapter", torch.float32, **CONFIGS["all-linear"])
    _merge(base, tmp_path / "adapter", tmp_path / "merge")
    exact = tuned.merge_and_unload().state_dict()
    merged = _network(tmp_path / "merge", torch.bfloat16)
    assert merged.config.dtype == torch.bfloat16
    for name, tensor in merged.state_dict().items():
        # Half a unit in the last place of bfloat16: 8 bits of mantissa.
        away = (tensor.double() - exact[name].double()).abs()
        assert bool((away <= exact[name].double().abs() * 2**-8 * 1.0001).all()), name
        wrong = (tensor != exact[name].to(torch.bfloat16)).double().mean()
        assert wrong < 0.001, name


@pytest.mark.torch
@pytest.mark.parametrize("targets", [["embed_tokens"], ["lm_head"], ["lm_head", "embed_tokens"]])
def test_a_tied_pair_comes_apart_when_one_of_it_changes(
    tiny: Tiny, tmp_path: Path, targets: list[str]
) -> None:
    base = tiny("llama_tied")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # peft warns of tied pairs and of its copies
        tuned = _peft(base, tmp_path / "adapter", torch.float32, r=2, target_modules=targets)
    events = _merge(base, tmp_path / "adapter", tmp_path / "merge")
    merged = _network(tmp_path / "merge")
    torch.testing.assert_close(_logits(merged), _logits(tuned), rtol=1e-4, atol=1e-4)
    _speaks_like(tuned, base, tmp_path / "adapter")
    assert merged.config.tie_word_embeddings is False
    assert any("tied" in event.text for event in events if isinstance(event, Notice))


@pytest.mark.torch
def test_an_embedding_that_came_with_the_adapter_must_be_the_bases(
    tiny: Tiny, tmp_path: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        _peft(tiny("llama"), tmp_path / "a", torch.float32, r=2, target_modules=["embed_tokens"])
    path = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(path)
    (copy,) = (name for name in tensors if "lora" not in name and "embed_tokens" in name)
    tensors[copy] = tensors[copy] + 1
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"brings a model\.embed_tokens\.weight of its own"):
        _merge(tiny("llama"), tmp_path / "a", tmp_path / "merge")


@pytest.mark.torch
@pytest.mark.parametrize("dora", [False, True])
def test_gpt2_keeps_its_weights_transposed(tmp_path: Path, dora: bool) -> None:
    import transformers

    config = transformers.GPT2Config(
        n_embd=32,
        n_head=2,
        n_layer=2,
        vocab_size=97,
        n_positions=32,
        bos_token_id=1,
        eos_token_id=2,
    )
    base = tmp_path / "base"
    transformers.GPT2LMHeadModel(config).save_pretrained(base)
    config = {"r": 4, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
    config |= {"use_dora": dora}
    tuned = _peft(base, tmp_path / "adapter", torch.float32, **config)
    _merge(base, tmp_path / "adapter", tmp_path / "merge")
    ours = _logits(_network(tmp_path / "merge"))
    torch.testing.assert_close(ours, _logits(tuned), rtol=1e-4, atol=1e-4)
    _speaks_like(tuned, base, tmp_path / "adapter")


@pytest.mark.torch
def test_a_peft_adapter_of_a_named_folder_needs_its_weights(tiny: Tiny, tmp_path: Path) -> None:
    """PEFT records no digest, and another model of the same shapes takes every matrix."""
    base = shutil.copytree(tiny("llama"), tmp_path / "base")
    _peft(base, tmp_path / "adapter", torch.float32, r=2, target_modules=["q_proj"])
    twin = shutil.copytree(base, tmp_path / "twin")
    (twin / "README.md").write_text("the same weights in another folder")
    events = _merge(twin, tmp_path / "adapter", tmp_path / "merge")
    assert not [event for event in events if isinstance(event, Notice)]
    network = _network(base)
    network.model.norm.weight.data += 1
    network.save_pretrained(twin)
    with pytest.raises(ModelError, match="has other weights") as caught:
        _merge(twin, tmp_path / "adapter", tmp_path / "other")
    assert "base_model_name_or_path" in caught.value.hint
    shutil.rmtree(base)
    events = _merge(twin, tmp_path / "adapter", tmp_path / "other")
    assert any("cannot be told" in event.text for event in events if isinstance(event, Notice))


@pytest.mark.torch
def test_side_files_come_along(tiny: Tiny, tmp_path: Path) -> None:
    base = shutil.copytree(tiny("llama"), tmp_path / "base")
    for name in ("tokenizer.json", "chat_template.jinja"):
        (base / name).write_text(name)
    _random_adapter(base, tmp_path / "adapter", Lora(rank=2))
    _merge(base, tmp_path / "adapter", tmp_path / "merge")
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "merge" / name).read_bytes() == (base / name).read_bytes()


def _random_adapter(base: Path, folder: Path, lora: Lora, digest: str = "") -> Path:
    weights = new_adapter(adapted_linears(Checkpoint(base), lora), lora, seed=0)
    rng = np.random.default_rng(0)
    weights = {n: rng.normal(0, 0.1, t.shape).astype(np.float32) for n, t in weights.items()}
    folder.mkdir(exist_ok=True)
    save_adapter(folder, lora, weights, Base(name="open_llama_3b_v2", digest=digest))
    return folder


def test_wrong_base_is_refused_with_the_reason(tiny: Tiny, tmp_path: Path) -> None:
    base = tiny("llama")
    adapter = _random_adapter(base, tmp_path / "adapter", Lora(rank=8), digest="a" * 64)
    with pytest.raises(ModelError, match=r"trained on open_llama_3b_v2 with digest aaaaaaaaaaaa"):
        _merge(base, adapter, tmp_path / "merge", digest="b" * 64)
    _merge(base, adapter, tmp_path / "merge", digest="a" * 64)
    narrow = tmp_path / "narrow"
    _reshape(base, narrow, "model.layers.1.self_attn.q_proj.weight", (32, 24))
    with pytest.raises(
        ModelError, match="adapter rank 8 needs q_proj of width 32, the base has 24"
    ) as caught:
        _merge(narrow, adapter, tmp_path / "other")
    assert "it names open_llama_3b_v2" in caught.value.hint
    _reshape(base, narrow, "model.layers.1.self_attn.q_proj.weight", None)
    with pytest.raises(ModelError, match=r"changes model.layers.1.self_attn.q_proj, which"):
        _merge(narrow, adapter, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def _reshape(base: Path, folder: Path, name: str, shape: tuple[int, int] | None) -> None:
    shutil.copytree(base, folder, dirs_exist_ok=True)
    tensors = load_file(base / "model.safetensors")
    del tensors[name]
    if shape is not None:
        tensors[name] = np.zeros(shape, np.float32)
    save_file(tensors, folder / "model.safetensors")


def test_a_sum_that_is_not_finite_stops_with_its_name(tiny: Tiny, tmp_path: Path) -> None:
    base = tiny("llama")
    adapter = _random_adapter(base, tmp_path / "adapter", Lora(rank=2, targets=("v_proj",)))
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    name = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
    tensors[name][3, 1] = np.nan
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.v_proj\.weight is not finite"):
        _merge(base, adapter, tmp_path / "merge")
    assert not (tmp_path / "merge").exists()


@pytest.mark.torch
def test_float16_overflow_is_seen(tiny: Tiny, tmp_path: Path) -> None:
    base = _in_dtype(tiny("llama"), tmp_path / "base", torch.float16)
    lora = Lora(rank=2, alpha=1e8, targets=("o_proj",))
    adapter = _random_adapter(base, tmp_path / "adapter", lora)
    with pytest.raises(ModelError, match=r"o_proj\.weight is not finite"):
        _merge(base, adapter, tmp_path / "merge")


# 12 tensors of 16 MB in 4 shards; the measuring process holds nothing else.
_LAYERS, _WIDTH, _INNER = 6, 1024, 8192
_MEASURE = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[4])
from pippin.artifact import Origin
from pippin.job import Job
from pippin.recipe import Data, Model, Quantize, Recipe
from pippin.stages.{stage} import {stage}
base, adapter, out = (Path(part) for part in sys.argv[1:4])
recipe = Recipe(model=Model(source="x"), data=Data(source="x"), quantize=Quantize(method="rtn"))
origin = Origin(stage="{stage}", inputs={{"model": ""}}, settings={{}}, versions={{}})
job = Job(stage="{stage}", recipe=recipe, inputs={{"model": base, "adapter": adapter}},
          folder=out, origin=origin)
import numpy, tracemalloc
tracemalloc.start()
list({stage}(job))
print(tracemalloc.get_traced_memory()[1])
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic model of several shards, with a rank 8 adapter for its linears."""
    import ml_dtypes

    folder = tmp_path_factory.mktemp("large")
    rng = np.random.default_rng(0)
    tensors = {
        f"model.layers.{n}.mlp.{part}.weight": rng.normal(size=shape).astype(ml_dtypes.bfloat16)
        for n in range(_LAYERS)
        for part, shape in {"up_proj": (_INNER, _WIDTH), "down_proj": (_WIDTH, _INNER)}.items()
    }
    config = {
        "model_type": "llama",
        "num_hidden_layers": _LAYERS,
        "hidden_size": _WIDTH,
        "num_attention_heads": 8,
        "vocab_size": 8,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    with Writer(folder, tensors, shard_bytes=50 << 20) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    assert len(list(folder.glob("model-*.safetensors"))) == 4
    _random_adapter(folder, folder / "adapter", Lora(rank=8))
    return folder


@pytest.mark.parametrize("stage", ["merge", "quantize"])
def test_memory_is_one_tensor_not_one_model(large: Path, tmp_path: Path, stage: str) -> None:
    """The peak of all allocations, numpy's included, in a process of its own."""
    tensor = _INNER * _WIDTH * 2
    adapter = 8 * (_INNER + _WIDTH) * 4 * 2 * _LAYERS
    delta = _INNER * _WIDTH * 4
    command = [sys.executable, "-c", _MEASURE.format(stage=stage), large, large / "adapter"]
    done = subprocess.run(
        [*command, tmp_path / "out", ""], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < tensor + delta + adapter
    shutil.rmtree(tmp_path / "out")


@pytest.mark.torch
def test_an_adapter_of_a_rounded_base_goes_into_the_whole_weights(
    tiny: Tiny, tmp_path: Path
) -> None:
    """Trained on four bits, merged into the weights before: peft's own merge into those."""
    whole = tiny("llama")
    small = quantize_folder(whole, tmp_path / "small", group_size=32)
    adapter = _random_adapter(small, tmp_path / "adapter", Lora(rank=2), artifact.digest(small))
    with pytest.raises(ModelError, match="was trained on") as refused:
        _merge(whole, adapter, tmp_path / "merge", artifact.digest(whole))
    assert "model.adapter_base" in refused.value.hint
    events = _merge(whole, adapter, tmp_path / "merge", trained_on=small)
    (said,) = [event.text for event in events if isinstance(event, Notice)]
    assert "its weights are this model's, at most 0.0" in said
    wanted = peft.PeftModel.from_pretrained(_network(whole), adapter).merge_and_unload()
    torch.testing.assert_close(_logits(_network(tmp_path / "merge")), _logits(wanted))
    with pytest.raises(ModelError, match="was trained on"):
        _merge(whole, adapter, tmp_path / "other", trained_on=whole)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("a nudged norm", "norm.weight .* as it is stored there, that can be 0 at most"),
        ("another linear", "up_proj.* 1.4 of its size away .* can be 0.53 at most"),
        ("a shorter norm", r"norm.weight .* has shape \(32,\); .* has \(31,\)"),
        ("one layer more", r"small lacks 9 weights of .*other, such as model.layers.2.input_lay"),
    ],
)
def test_a_rounded_base_of_another_model_is_refused(
    tiny: Tiny, tmp_path: Path, change: str, said: str
) -> None:
    whole = tiny("llama")
    small = quantize_folder(whole, tmp_path / "small", group_size=32)
    adapter = _random_adapter(small, tmp_path / "adapter", Lora(rank=2), artifact.digest(small))
    other = shutil.copytree(whole, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    name = next(n for n in weights if ("norm" if "norm" in change else "up_proj") in n)
    if change == "a nudged norm":
        weights[name] = weights[name] * np.float32(1.001)
    elif change == "another linear":
        weights[name] = np.random.default_rng(0).permuted(weights[name])
    elif change == "one layer more":
        layer = {n.replace(".1.", ".2."): w for n, w in weights.items() if ".1." in n}
        weights |= layer
    else:
        weights[name] = weights[name][:-1]
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=said):
        _merge(other, adapter, tmp_path / "merge", trained_on=small)


@pytest.mark.torch
def test_quantized_base_becomes_dense(tiny: Tiny, tmp_path: Path) -> None:
    """Merged into the weights as the training saw them, and not rounded to the grid again."""
    base = quantize_folder(tiny("llama"), tmp_path / "base", group_size=32)
    lora = Lora(rank=2, targets=("q_proj",))
    adapter = _random_adapter(base, tmp_path / "adapter", lora)
    events = _merge(base, adapter, tmp_path / "merge")
    assert any("quantized" in event.text for event in events if isinstance(event, Notice))
    pairs = load_file(adapter / "adapter_model.safetensors")
    merged = Checkpoint(tmp_path / "merge")
    for name, tensor in dense_tensors(base):
        want = tensor.astype(np.float64)
        if "q_proj" in name:
            linear = f"base_model.model.{name.removesuffix('.weight')}"
            a, b = (pairs[f"{linear}.lora_{part}.weight"] for part in "AB")
            want = want + lora.scale * (b.astype(np.float64) @ a)
        np.testing.assert_allclose(merged.read(name), want, rtol=1e-5, atol=1e-6)
    assert "quantization" not in json.loads((tmp_path / "merge" / "config.json").read_text())
    assert _logits(_network(tmp_path / "merge")).shape == (1, 8, 97)


def _tensors(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "quantize.json").read_text())["tensors"]


@pytest.mark.torch
@pytest.mark.parametrize(("method", "few_bits"), [("mse", False), ("mse", True), ("best", False)])
def test_one_pass_gives_the_merged_model_s_codes(
    tmp_path: Path, method: Any, few_bits: bool
) -> None:
    base = write_speaking_model(tmp_path / "model")
    write_rows(tmp_path / "rows")

    def codes(name: str, inputs: dict[str, Path], method: Any = method) -> DenseView:
        recipe = Recipe(
            model=Model(source="model", device="cpu", dtype="float32"),
            data=Data(source="rows", max_seq_len=64),
            quantize=Quantize(
                method=method, group_size=32, embed_group_size=32, calibration_tokens=200
            ),
            folder=tmp_path,
        )
        origin = Origin(stage="quantize", inputs={"model": ""}, settings={}, versions={})
        folder = tmp_path / name
        job = Job(stage="quantize", recipe=recipe, inputs=inputs, folder=folder, origin=origin)
        list(quantize(job))
        return DenseView(folder)

    if few_bits:
        base = codes("base", {"model": base}, "rtn").checkpoint.folder
    adapter = _random_adapter(base, tmp_path / "adapter", Lora(rank=2, targets=("all-linear",)))
    _merge(base, adapter, tmp_path / "merged")
    one = codes("one", {"model": base, "adapter": adapter})
    two = codes("two", {"model": tmp_path / "merged"})
    assert one.tensors == two.tensors
    if method == "mse":
        for name in two.tensors:
            np.testing.assert_array_equal(one.read(name), two.read(name))
        return
    # Calibrated with the adapter beside its base: what it sees differs by rounding, codes may flip.
    errors = [
        [row["output_error"] or 0 for row in _tensors(tmp_path / name)] for name in ("one", "two")
    ]
    assert errors[0] == pytest.approx(errors[1], rel=0.1)
