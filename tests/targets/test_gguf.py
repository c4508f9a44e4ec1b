"""GGUF files hold the codes bit for bit: read by gguf, by transformers, by llama.cpp."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from safetensors.numpy import load_file, save_file
from tests.targets.tiny_quantized import CHANNEL, KINDS, usual
from tests.tiny_runs import write_speaking_model

from pippin.engines import Sampling
from pippin.errors import ModelError, PippinError
from pippin.events import Notice
from pippin.model.quantized import DenseView, dense_tensors, dequantize
from pippin.quantizers import Grid, load_quantizer
from pippin.quantizers.nested import MOST, nested_grid
from pippin.recipe import Quantize
from pippin.targets import Bundle, load_target
from pippin.targets.folder import Affine
from pippin.targets.gguf.reading import load_tensors

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.gguf]
CONTEXT = 64
PROMPT = np.array([5, 6, 7, 250, 9], np.int32)


def deploy(quantized: Path) -> Path:
    folder = quantized.parent / "bundle"
    folder.mkdir()
    bundle = Bundle(quantized=quantized, folder=folder, context=CONTEXT)
    deploy.events = list(load_target("gguf").write(bundle))
    return folder


def grids(linear: Grid, embedding: Grid = CHANNEL):
    return lambda module: embedding if module.endswith(("embed_tokens", "lm_head")) else linear


def peer(path: Path):
    """The file as transformers reads it: config, tensors and rotary embedding are its own."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    with torch.no_grad():
        return model(torch.tensor(PROMPT[None].astype(np.int64))).logits.log_softmax(-1)[0].numpy()


def parent(folder: Path):
    from pippin.engines import load_engine

    return load_engine("torch", "cpu").load(folder, "float32")


# transformers leaves out Llama 3's rope, Gemma's second rope and Qwen 3's width of heads.
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"llama3_rope", "qwen3"}))
def test_transformers_computes_the_same_from_the_file(quantized, kind):
    folder = quantized(kind)
    found = peer(deploy(folder) / "model.gguf")
    expected = parent(folder).topk(PROMPT[None], 320)
    found = np.take_along_axis(found, expected.ids_BTK[0], -1)
    np.testing.assert_allclose(found, expected.logprobs_BTK[0], atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "llama3_rope", "qwen3", "gemma3"])
def test_the_scorer_is_the_file_itself(quantized, kind):
    folder = quantized(kind)
    bundle = deploy(folder)
    found, expected = load_tensors(bundle), parent(folder)
    np.testing.assert_array_equal(found.logprobs(PROMPT[None]), expected.logprobs(PROMPT[None]))
    greedy = Sampling(max_tokens=12)
    assert list(found.generate([PROMPT], greedy)) == list(expected.generate([PROMPT], greedy))
    said = json.loads((bundle / "deploy.json").read_text())
    assert ("llama.cpp itself was not run" in said["runtime"]) != ("mean_kl" in said["check"])


def test_biases_are_ordered_as_their_rows(quantized, monkeypatch):
    monkeypatch.setitem(KINDS, "biased", ("LlamaConfig", {"attention_bias": True}))
    folder = quantized("biased")
    tensors = load_file(folder / "model.safetensors")
    bias_O = tensors["model.layers.0.self_attn.k_proj.bias"]
    bias_O[:] = np.arange(len(bias_O))
    save_file(tensors, folder / "model.safetensors")
    bundle = deploy(folder)
    written = {t.name: t.data for t in GGUFReader(bundle / "model.gguf").tensors}
    first_head = [half * 8 + i for i in range(8) for half in (0, 1)]  # neighbours turn together
    assert written["blk.0.attn_k.bias"][:16].tolist() == first_head
    expected = parent(folder).logprobs(PROMPT[None])
    np.testing.assert_allclose(load_tensors(bundle).logprobs(PROMPT[None]), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "odd_heads", "qwen2", "qwen3"])
def test_a_file_becomes_the_folder_it_came_from(quantized, tmp_path, kind):
    """Our reader of GGUF models, written against llama.cpp's files, gives our weights in bf16."""
    from pippin.model.gguf_file import convert, open_gguf

    folder = quantized(kind)
    (tmp_path / "back").mkdir()
    list(convert(open_gguf(deploy(folder) / "model.gguf"), tmp_path / "back"))
    back = dict(dense_tensors(tmp_path / "back"))
    for name, values in dense_tensors(folder):
        np.testing.assert_array_equal(back.pop(name), values.astype(back_dtype()), err_msg=name)
    assert not back


def back_dtype():
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("grid", "kind"),
    [
        (Grid(bits=4, group_size=32, symmetric=True), "Q4_0"),
        (Grid(bits=4, group_size=32, symmetric=False), "Q4_1"),
        (Grid(bits=3, group_size=32, symmetric=True), "Q4_0"),
        (Grid(bits=2, group_size=32, symmetric=False), "Q4_1"),
        (Grid(bits=5, group_size=32, symmetric=True), "Q5_0"),
        (Grid(bits=5, group_size=32, symmetric=False), "Q5_1"),
        (Grid(bits=6, group_size=32, symmetric=True), "Q8_0"),
        (Grid(bits=8, group_size=32, symmetric=True), "Q8_0"),
        (CHANNEL, "Q8_0"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.bits}-{value.symmetric}",
)
def test_every_grid_has_a_type_that_loses_nothing(quantized, grid, kind):
    from gguf import GGUFReader
    from gguf.quants import dequantize

    folder = quantized("qwen3", grids(grid, grid))
    tensors = {t.name: t for t in GGUFReader(deploy(folder) / "model.gguf").tensors}
    for name, source in (
        ("blk.1.ffn_down", "model.layers.1.mlp.down_proj"),
        ("token_embd", "model.embed_tokens"),
    ):
        tensor = tensors[f"{name}.weight"]
        assert tensor.tensor_type.name == kind
        expected = DenseView(folder).read(f"{source}.weight")
        np.testing.assert_array_equal(dequantize(tensor.data, tensor.tensor_type), expected)
    said = [event.text for event in deploy.events if isinstance(event, Notice)]
    assert any(f"{grid.bits} bits stored as {kind}" in text for text in said) == (
        grid.bits in (2, 3, 6)
    )


@pytest.mark.parametrize("bits", MOST)
def test_k_types_hold_nested_codes_exactly(bits):
    """Codes, multiples and steps at their ends; gguf's own reader takes the bytes apart."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize as read

    from pippin.targets.gguf.superblocks import pack_superblocks

    grid, rng = nested_grid(bits), np.random.default_rng(bits)
    weight_OI = rng.standard_normal((6, 768), np.float32) * np.exp(rng.normal(size=(6, 768)))
    weight_OI[0], weight_OI[1, :256], weight_OI[2, :256] = 0, 1e-6 * weight_OI[1, :256], 3.0
    codes = load_quantizer("rtn").quantize(weight_OI, grid, back_dtype())
    matrix = Affine(
        bits=bits,
        codes_OI=codes.codes_OI,
        scales_OG=codes.scales_OG.astype(np.float32),
        biases_OG=codes.biases_OG.astype(np.float32),
    )
    found = read(pack_superblocks("x", matrix), GGMLQuantizationType[f"Q{bits}_K"])
    expected = dequantize(codes.codes_OI, codes.scales_OG, codes.biases_OG)
    np.testing.assert_array_equal(found, expected)
    assert codes.codes_OI.max() == 2**bits - 1
    bent = replace(matrix, scales_OG=matrix.scales_OG * np.float32(1.01))
    with pytest.raises(ModelError, match="scales of x are no multiples"):
        pack_superblocks("x", bent)


def test_a_file_of_k_types_is_read_by_others(quantized):
    folder = quantized("wide", grids(nested_grid(4), nested_grid(6)))
    path = deploy(folder) / "model.gguf"
    reader = GGUFReader(path)
    assert {t.tensor_type.name for t in reader.tensors} == {"Q4_K", "Q6_K", "F32"}
    assert int(reader.fields["general.file_type"].contents()) == 14
    expected = parent(folder).topk(PROMPT[None], 320)
    found = np.take_along_axis(peer(path), expected.ids_BTK[0], -1)
    np.testing.assert_allclose(found, expected.logprobs_BTK[0], atol=1e-4)


def test_dense_tensors_keep_their_dtype(quantized):
    folder = quantized("llama", lambda module: None)
    types = {t.tensor_type.name for t in GGUFReader(deploy(folder) / "model.gguf").tensors}
    assert types == {"F32"}


def test_llama_3_rope_is_stretched_as_transformers_does(quantized):
    from gguf import GGUFReader
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    folder = quantized("llama3_rope")
    tensors = {t.name: t for t in GGUFReader(deploy(folder) / "model.gguf").tensors}
    rotary = LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder))
    plain = 1e4 ** -(np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(
        plain / tensors["rope_freqs.weight"].data, rotary.inv_freq.numpy(), rtol=1e-6
    )


def test_the_bundle_describes_itself(quantized):
    bundle = deploy(quantized())
    found = json.loads((bundle / "deploy.json").read_text())
    assert (found["target"], found["context"], found["stop_ids"]) == ("gguf", CONTEXT, [2])
    assert found["size_bytes"] == (bundle / "model.gguf").stat().st_size
    assert found["check"]["equal_tensors"] == 20
    assert {"tokenizer.json", "chat_template.jinja", "README.md", "config.json"} <= {
        path.name for path in bundle.iterdir()
    }
    fields = {k: f.contents() for k, f in GGUFReader(bundle / "model.gguf").fields.items()}
    assert fields["tokenizer.chat_template"] == (bundle / "chat_template.jinja").read_text()
    assert fields["tokenizer.ggml.eos_token_id"] == 2
    readme = (bundle / "README.md").read_text()
    assert "llama-cli -m model.gguf -c 64" in readme
    assert "token ids [2]" in readme


@pytest.mark.parametrize("kind", sorted([*KINDS, "gemma3"]))
def test_llama_cpp_computes_the_same_from_dense_tensors(quantized, kind):
    """Every family's network, rope and order of rows; transformers does not read all of them."""
    llama_cpp = pytest.importorskip("llama_cpp")
    from pippin.targets.gguf.llama_cpp import LlamaCppModel

    folder = quantized(kind, lambda module: None)
    path, row_BT = deploy(folder) / "model.gguf", np.arange(7, 47, dtype=np.int32)[None]
    float32 = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    found, expected = LlamaCppModel(path, CONTEXT, **float32), parent(folder)
    # Its GELU is a table in float16.
    atol = 0.05 if kind == "gemma3" else 1e-4
    np.testing.assert_allclose(found.logprobs(row_BT), expected.logprobs(row_BT), atol=atol)
    greedy = Sampling(max_tokens=12)
    assert list(found.generate([PROMPT], greedy)) == list(expected.generate([PROMPT], greedy))


@pytest.mark.parametrize("bits", MOST)
def test_llama_cpp_runs_every_k_type(quantized, bits):
    pytest.importorskip("llama_cpp")
    bundle = deploy(quantized("wide", grids(nested_grid(bits))))
    check = json.loads((bundle / "deploy.json").read_text())["check"]
    assert check["mean_kl"] < 0.1
    assert check["tokenizer"] == "llama.cpp"


def test_an_altered_file_is_refused(quantized, tmp_path):
    copy = shutil.copytree(deploy(quantized()), tmp_path / "copy")
    with (copy / "model.gguf").open("r+b") as file:
        file.seek(-64, 2)
        file.write(b"\x55" * 8)
    with pytest.raises(ModelError, match=r"model\.gguf is not the file"):
        load_target("gguf").load(copy)


def test_one_changed_code_is_found(quantized):
    from pippin.targets.gguf.reading import require_equal_tensors

    folder = quantized()
    path = deploy(folder) / "model.gguf"
    assert require_equal_tensors(path, DenseView(folder)) == 20
    with path.open("r+b") as file:
        file.seek(-200, 2)
        byte = file.read(1)[0]
        file.seek(-200, 2)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(PippinError, match="other values of model"):
        require_equal_tensors(path, DenseView(folder))


def test_scales_that_float16_would_round_are_an_error(quantized):
    from safetensors.numpy import load_file, save_file

    folder = quantized()
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.v_proj"
    for kind in ("scales", "biases"):
        tensors[f"{name}.{kind}"] = (tensors[f"{name}.{kind}"].astype(np.float32) * 2e-7).astype(
            tensors[f"{name}.{kind}"].dtype
        )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"group scales of .*v_proj are no float16") as caught:
        deploy(folder)
    assert "quantize.keep" in caught.value.hint


GOOD = Quantize(bits=4, scheme="affine", embed_bits=8, embed_scheme="symmetric")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"bits": 5}, None),
        ({"embed_bits": 16, "embed_scheme": "affine"}, None),
        ({"bits": 8}, "8-bit codes with zero points, as the linears"),
        ({"bits": 6, "scheme": "symmetric"}, None),
        ({"embed_scheme": "affine"}, "8-bit codes with zero points, as the embedding"),
    ],
)
def test_codes_are_asked_about_before_any_work(quantized, changes, message):
    refusal = load_target("gguf").refusal(replace(GOOD, **changes), quantized())
    assert refusal is None if message is None else message in refusal[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba2"}, "model type mamba2"),
        ({"model_type": "mistral", "sliding_window": 64}, "sliding-window attention (64"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope type yarn"),
        ({"model_type": "gemma3_text", "layer_types": ["full_attention"] * 2}, "every sixth"),
        ({"model_type": "gemma3_text", "query_pre_attn_scalar": 99}, "scaled by 99"),
    ],
)
def test_models_llama_cpp_would_run_otherwise_are_refused(quantized, changes, message):
    folder = quantized("llama", usual)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    assert message in load_target("gguf").refusal(GOOD, folder)[0]


def test_a_tokenizer_llama_cpp_has_no_name_for_is_an_error(quantized):
    folder = quantized()
    path = folder / "tokenizer.json"
    found = json.loads(path.read_text())
    found["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [{"type": "Whitespace"}, found["pre_tokenizer"]],
    }
    path.write_text(json.dumps(found))
    with pytest.raises(ModelError, match="cuts text by Whitespace in another form and ByteLevel"):
        deploy(folder)


def test_bytes_that_merge_into_nothing_are_an_error(quantized):
    folder = quantized()
    path = folder / "tokenizer.json"
    found = json.loads(path.read_text())
    found["model"]["merges"] = []
    path.write_text(json.dumps(found))
    assert "merges no pairs" in load_target("gguf").refusal(GOOD, folder)[0]
    with pytest.raises(ModelError, match="merges no pairs"):
        deploy(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_scales_that_float16_would_round_are_told_before_any_work(tmp_path, dtype):
    from safetensors.torch import load_file, save_file

    folder = write_speaking_model(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    cast = {name: value.to(getattr(torch, dtype)) for name, value in weights.items()}
    save_file(cast, folder / "model.safetensors", {"format": "pt"})
    message = load_target("gguf").refusal(GOOD, folder)[0]
    assert ("scales are float32" in message) == (dtype == "float32")
    assert ("merges no pairs" in message) == (dtype != "float32")
