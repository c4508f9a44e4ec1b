"""A tiny model end to end: quantized folder to .pte, run in ExecuTorch's runtime, and checked."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from tests.targets.tiny_quantized import CHANNEL, LINEAR, write_folder

from pippin.engines import Sampling
from pippin.errors import ModelError, PippinError
from pippin.stages.generate import load_speaker
from pippin.targets import Bundle, load_target

pytest.importorskip("executorch")
pytestmark = [
    pytest.mark.executorch,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
CONTEXT = 64


def deploy(quantized, folder, context=CONTEXT):
    folder.mkdir()
    bundle = Bundle(quantized=quantized, folder=folder, context=context)
    return list(load_target("executorch").write(bundle))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    source, folder = tmp_path_factory.mktemp("quantized"), tmp_path_factory.mktemp("b") / "bundle"
    deploy(write_folder(source), folder)
    return folder


@pytest.fixture(scope="module")
def model(bundle):
    return load_target("executorch").load(bundle)


def test_the_bundle_describes_itself(bundle):
    found = json.loads((bundle / "deploy.json").read_text())
    assert found["target"] == "executorch"
    assert found["context"] == CONTEXT
    assert found["stop_ids"] == [2]
    assert (found["check"]["layers"]["prompts"], found["check"]["layers"]["stretches"]) == (4, 3)
    assert found["check"]["layers"]["explained"] > 0.9
    assert found["check"]["layers"]["determined"] > 0.9
    assert found["size_bytes"] == (bundle / "model.pte").stat().st_size
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= {
        path.name for path in bundle.iterdir()
    }
    assert "of a token's largest, in every layer" in (bundle / "README.md").read_text()


def test_every_linear_is_in_one_of_few_subgraphs(bundle):
    found = json.loads((bundle / "deploy.json").read_text())["delegation"]
    assert found["subgraphs"] <= 2 + 2
    rows = {row["operator"]: row for row in found["operators"]}
    assert rows["aten.linear"]["delegated"] >= 2 * 7 + 1
    assert not [name for name, row in rows.items() if "linear" in name and row["left"]]
    assert rows["llama.custom_sdpa"]["left"] == 2
    assert all(row["why"] for row in rows.values() if row["left"])
    assert 0.5 < found["flops_share"] < 1
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1)


def test_a_tied_embedding_is_stored_once(bundle, quantized):
    from pippin.targets.folder import Folder

    codes = Folder(quantized()).affine("model.embed_tokens").signed.tobytes()
    assert (bundle / "model.pte").read_bytes().count(codes) == 1
    said = json.loads((bundle / "deploy.json").read_text())
    assert said["shared_bytes"] == len(codes) == 320 * 64


def test_the_runner_finds_its_constants(bundle):
    from executorch.runtime import Runtime

    program = Runtime.get().load_program(bundle / "model.pte")
    read = {n: program.load_method(n).execute(())[0] for n in program.method_names - {"forward"}}
    assert read["get_max_context_len"] == read["get_max_seq_len"] == CONTEXT
    assert (read["get_vocab_size"], read["get_n_layers"], read["get_bos_id"]) == (320, 2, 1)
    assert read["use_kv_cache"]
    assert read["enable_dynamic_shape"]
    assert read["use_sdpa_with_kv_cache"]


def test_scores_are_log_probabilities(model):
    tokens = np.arange(24, dtype=np.int32).reshape(2, 12) * 5 % 320
    logprobs, top = model.logprobs(tokens), model.topk(tokens, 320)
    assert logprobs.shape == (2, 11)
    assert logprobs.dtype == np.float32
    assert top.ids_BTK.shape == top.logprobs_BTK.shape == (2, 12, 320)
    np.testing.assert_allclose(np.exp(top.logprobs_BTK).sum(-1), 1, rtol=1e-4)
    assert (np.diff(top.logprobs_BTK) <= 0).all()
    asked = model.topk(tokens[:, :-1], 0, tokens[:, 1:, None])
    np.testing.assert_allclose(asked.logprobs_BTK[..., 0], logprobs, atol=1e-5)


def test_generate_stops_and_fills(model):
    prompts = [np.array([5, 6, 7]), np.array([9])]
    steps = list(model.generate(prompts, Sampling(max_tokens=6)))
    assert len(steps) == 6
    first = [step[0] for step in steps]
    alone = [step[0] for step in model.generate(prompts[:1], Sampling(max_tokens=6))]
    assert first == alone
    stop = Sampling(max_tokens=6, stop=frozenset([first[3]]))
    cut = [step[0] for step in model.generate(prompts, stop)]
    assert [t for t in cut if t is not None] == first[: first.index(first[3])]


def test_the_last_slot_of_the_context_is_used(model):
    row = np.arange(CONTEXT, dtype=np.int32)[None]
    assert np.isfinite(model.logprobs(row)).all()
    assert len(list(model.generate([row[0]], Sampling(max_tokens=5)))) == 1
    with pytest.raises(ModelError, match=f"context of {CONTEXT}"):
        model.logprobs(np.zeros((1, CONTEXT + 2), np.int32))


def test_drawn_tokens_follow_the_seed(model):
    def draw(seed):
        hot = Sampling(max_tokens=8, temperature=1.5, top_p=0.9, seed=seed)
        return [step[0] for step in model.generate([np.array([5])], hot)]

    assert draw(1) == draw(1) != draw(2)


def test_one_changed_scale_is_found_in_the_file(bundle, quantized):
    from pippin.targets.executorch.parts import read_weights
    from pippin.targets.executorch.stored import require_stored
    from pippin.targets.folder import Folder

    weights = read_weights(Folder(quantized()), CONTEXT)
    # Fourteen linears and the head, codes and scales each.
    assert require_stored(bundle / "model.pte", weights) == 15 * 2
    weights.layers[1].attention.q_proj.scales[3, 0] *= 1.125
    with pytest.raises(PippinError, match=r"q_proj\.scales .*1 of 30"):
        require_stored(bundle / "model.pte", weights)


def test_another_tokenizer_of_equal_size_does_not_speak(bundle, tmp_path):
    copy = shutil.copytree(bundle, tmp_path / "copy")
    text = (copy / "tokenizer.json").read_text()
    swapped = text.replace('"a":', '"?":').replace('"e":', '"a":').replace('"?":', '"e":')
    assert len(swapped) == len(text)
    assert swapped != text
    (copy / "tokenizer.json").write_text(swapped)
    with pytest.raises(ModelError, match=r"tokenizer\.json is not the file"):
        load_speaker(copy, lambda notice: None)
    (copy / "tokenizer.json").write_text(text)
    (copy / "added_tokens.json").write_text("{}")
    with pytest.raises(ModelError, match=r"added_tokens\.json is not the file"):
        load_speaker(copy, lambda notice: None)


def test_a_file_that_computes_something_else_is_refused(bundle, quantized):
    """One scale of one group, in either layer; the embedding; a mask that looks back too far."""
    from pippin.targets.executorch.check import prove
    from pippin.targets.executorch.parts import read_weights
    from pippin.targets.folder import Folder

    weights, prompts = read_weights(Folder(quantized()), CONTEXT), [[5, 6, 7, 8], [9]]
    found = prove(bundle / "model.pte", weights, prompts)
    assert (found.prompts, found.tokens, found.stretches) == (2, 5, 3)
    assert found.between_difference < 1e-5
    for module in (*(layer.attention.o_proj for layer in weights.layers), weights.entry.embedding):
        module.scales[3, 0] *= 1.125
        with pytest.raises(PippinError, match="does not compute what its program does"):
            prove(bundle / "model.pte", weights, [[5, 3, 7, 8]])
        module.scales[3, 0] /= 1.125
    shape = replace(weights.shape, windows=(2, None))
    weights.shape = shape
    with pytest.raises(PippinError, match="between stretches by"):
        prove(bundle / "model.pte", weights, prompts)


@pytest.mark.parametrize(
    "kind",
    [
        "odd_heads",
        "qwen3",
        "gemma3_short",
        pytest.param("gemma3", marks=pytest.mark.slow),
        pytest.param("mistral", marks=pytest.mark.slow),
        pytest.param("openllama", marks=pytest.mark.slow),
        pytest.param("qwen2", marks=pytest.mark.slow),
        pytest.param("untied", marks=pytest.mark.slow),
    ],
)
def test_other_families_end_to_end(quantized, tmp_path, kind):
    deploy(quantized(kind), tmp_path / "bundle")
    found = json.loads((tmp_path / "bundle" / "deploy.json").read_text())["check"]
    assert found["layers"]["explained"] > 0.9
    assert found["layers"]["between_difference"] < 1e-5
    assert found["top1"] > 0.8


@pytest.mark.slow
def test_linears_of_four_and_eight_bits_in_one_model(quantized, tmp_path):
    eight = ("down_proj", "o_proj", "embed_tokens")
    deploy(quantized("llama", lambda m: CHANNEL if m.endswith(eight) else LINEAR), tmp_path / "b")
    found = json.loads((tmp_path / "b" / "deploy.json").read_text())
    assert found["stored"] == 15 * 2
    assert found["check"]["layers"]["explained"] > 0.9


def test_dense_layers_run_in_float32(quantized, tmp_path):
    deploy(quantized("llama", lambda module: None), tmp_path / "bundle")
    found = json.loads((tmp_path / "bundle" / "deploy.json").read_text())["check"]
    assert found["max_difference"] < 1e-4
    assert found["greedy_equal"] == found["greedy_tokens"]
    assert found["layers"]["determined"] == 1


def test_a_context_beyond_the_model_is_refused(quantized, tmp_path):
    with pytest.raises(ModelError, match="positions up to 256"):
        deploy(quantized(), tmp_path / "bundle", context=512)
