"""A tiny model for ExecuTorch's MLX delegate: one piece, its bytecode true to transformers."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.targets.tiny_quantized import CHANNEL

from pippin.errors import ModelError, PippinError
from pippin.quantizers import Grid
from pippin.recipe import Quantize
from pippin.targets import load_target

pytest.importorskip("executorch")
pytestmark = [
    pytest.mark.executorch,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
TARGET, CONTEXT = "executorch-mlx", 64


def test_the_whole_program_is_one_piece(bundle):
    found = json.loads((bundle / "deploy.json").read_text())
    report = found["delegation"]
    assert (report["delegate"], report["subgraphs"], report["flops_share"]) == ("mlx", 1, 1.0)
    counts = {row["operator"]: row["delegated"] for row in report["operators"]}
    assert counts["aten.linear"] == 2 * 7 + 1
    assert counts["mlx.custom_sdpa"] == 2
    assert not [row for row in report["operators"] if row["left"]]
    assert sum(row["share"] for row in report["operators"]) == pytest.approx(1)
    assert found["check"]["mean_kl"] < 1e-6
    assert found["check"]["greedy_equal"] == found["check"]["greedy_tokens"]


def test_a_tied_embedding_is_stored_once(bundle):
    from executorch.exir._serialize._program import deserialize_pte_binary

    data = deserialize_pte_binary((bundle / "model.pte").read_bytes()).named_data
    sizes = [len(data.buffers[entry.buffer_index]) for entry in data.pte_data.values()]
    # 320 rows of 64 8-bit codes.
    assert sizes.count(320 * 64) == 1


def test_a_changed_instruction_is_seen(bundle, source):
    from pippin.targets.agreement import compare, load_parent

    model = load_target(TARGET).load(bundle)
    chain = model._graph["instruction_chains"][model._graph["main_chain_idx"]]
    last = [one for one in chain["instructions"] if one["op_name"] == "SdpaNode"][-1]
    last["scale"] *= 1.1
    found = compare(model, load_parent(source), [[5, 6, 7, 8]], CONTEXT)
    assert found.mean_kl > 1e-4


def test_a_row_may_fill_the_context(bundle):
    model = load_target(TARGET).load(bundle)
    row = np.arange(CONTEXT, dtype=np.int32)
    np.testing.assert_allclose(
        model.last_logits(row, 0), model.logits(row)[-1], atol=1e-4, rtol=1e-4
    )
    with pytest.raises(ModelError, match=f"context of {CONTEXT}"):
        model.last_logits(row, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["qwen2", "qwen3", "odd_heads", "untied", "llama3_rope", "mistral", "openllama"]
)
def test_other_families(deploy, quantized, tmp_path, kind):
    found = json.loads((deploy(quantized(kind), tmp_path / "bundle") / "deploy.json").read_text())
    assert found["check"]["max_difference"] < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2, 5, 6])
def test_other_widths_and_dense_layers(deploy, quantized, tmp_path, bits):
    grid = Grid(bits=bits, group_size=32, symmetric=True)
    kept = {"model.layers.0.mlp.up_proj": None, "model.embed_tokens": CHANNEL}
    folder = quantized("llama", lambda module: kept.get(module, grid))
    found = json.loads((deploy(folder, tmp_path / "bundle") / "deploy.json").read_text())
    assert found["check"]["max_difference"] < 1e-3


def test_codes_that_do_not_fit_are_refused_before_any_work(source):
    good = Quantize(bits=6, group_size=64, scheme="symmetric", embed_scheme="symmetric")
    target = load_target(TARGET)
    assert target.refusal(good, source) is None
    for change, words in (
        ({"scheme": "affine"}, "linears have symmetric codes"),
        ({"embed_scheme": "affine"}, "embedding have symmetric codes"),
        ({"bits": 3}, "2, 4, 5, 6 or 8 bits, not 3"),
    ):
        assert words in target.refusal(replace(good, **change), source)[0]


def test_affine_codes_in_a_folder_are_an_error(deploy, quantized, tmp_path):
    grid = Grid(bits=4, group_size=32, symmetric=False)
    with pytest.raises(ModelError, match="affine codes of 4 bits"):
        deploy(quantized("llama", lambda module: grid), tmp_path / "bundle")


def test_a_generator_that_fails_leaves_nothing(tmp_path):
    from pippin.targets.executorch.mlx.schema import _generate

    source = tmp_path / "executorch" / "backends" / "mlx" / "serialization"
    source.mkdir(parents=True)
    (source / "generate.py").write_text("raise SystemExit('no flatc here')")
    (tmp_path / "cache").mkdir()
    with pytest.raises(PippinError, match="no flatc here"):
        _generate(source, tmp_path / "cache" / "made")
    assert not list((tmp_path / "cache").iterdir())


def test_where_the_cache_cannot_be_written_nothing_is_left(tmp_path):
    (tmp_path / "file").touch()  # no folder can be made in it
    code = (
        "from pathlib import Path; from pippin.targets.executorch.mlx.schema import _room; "
        f"folder = _room(Path({str(tmp_path / 'file' / 'cache' / 'made')!r})); "
        "folder.mkdir(); print(folder.parent)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "pippin-" in done.stdout
    assert not Path(done.stdout.strip()).exists()
