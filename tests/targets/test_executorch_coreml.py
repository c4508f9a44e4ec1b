"""A tiny model for ExecuTorch's Core ML delegate: one piece, its program true to its parent."""

import json

import pytest

from pippin.targets import Bundle, load_target

pytest.importorskip("executorch")
pytest.importorskip("coremltools")
pytestmark = [
    pytest.mark.executorch,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
CONTEXT = 64


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_the_whole_program_is_one_package(quantized, tmp_path, kind):
    folder = tmp_path / "bundle"
    folder.mkdir()
    bundle = Bundle(quantized=quantized(kind), folder=folder, context=CONTEXT)
    target = load_target("executorch-coreml")
    list(target.write(bundle))
    found = json.loads((folder / "deploy.json").read_text())
    report = found["delegation"]
    assert (report["delegate"], report["subgraphs"], report["flops_share"]) == ("coreml", 1, 1.0)
    assert not [row for row in report["operators"] if row["left"]]
    assert found["check"]["mean_kl"] < 1e-3
    # Every matrix is stored as codes: fourteen linears, and the embedding for its head too.
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    assert len(list(target.load(folder).matrices())) == layers * 7 + 1
