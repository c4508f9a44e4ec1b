"""The built-in SmolLM2-135M as a .pte: few subgraphs, small, and true to its parent."""

import json

import pytest

from pippin.targets import Bundle, load_target

pytest.importorskip("executorch")
pytestmark = [
    pytest.mark.executorch,
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def bundle(smollm2, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle")
    list(load_target("executorch").write(Bundle(quantized=smollm2, folder=folder, context=256)))
    return folder


def test_a_subgraph_a_layer_and_codes_stored_once_each(bundle):
    found = json.loads((bundle / "deploy.json").read_text())
    assert found["delegation"]["subgraphs"] <= 30 + 2
    assert found["size_bytes"] < 120e6
    # Means over all tokens. One greedy token is not determined: float32 noise of 3e-7 after every
    # norm changed the token after "The capital of France is" in 3 of 16 eager runs.
    assert found["check"]["mean_kl"] <= 2 * found["check"]["nudged_kl"]
