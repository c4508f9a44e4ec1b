"""The built-in SmolLM2-135M in every format but ExecuTorch's: small, and true to its parent."""

import importlib
import json

import numpy as np
import pytest

from pippin.engines import Sampling
from pippin.model.tokenizer import load_tokenizer
from pippin.targets import Bundle, load_target
from pippin.targets.agreement import load_parent

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
PACKAGES = {
    "coreai": "coreai_torch",
    "coreml": "coremltools",
    "gguf": "gguf",
    "hf": "compressed_tensors",
    "mlx": "mlx_lm",
}
# Megabytes, and how far a mean may be from the parent: hf's embedding is rounded to bfloat16 once
# more, and Core ML computes in float16.
LIMITS = {
    "coreai": (130, 1e-4),
    "coreml": (110, 0.01),
    "gguf": (95, None),
    "hf": (120, 0.02),
    "mlx": (100, 1e-4),
}


@pytest.mark.parametrize("target", sorted(PACKAGES))
def test_the_file_is_small_and_answers_as_its_parent_does(smollm2, tmp_path, target):
    if importlib.util.find_spec(PACKAGES[target]) is None:
        pytest.skip(f"{PACKAGES[target]} is not installed")
    list(load_target(target).write(Bundle(quantized=smollm2, folder=tmp_path, context=256)))
    found = json.loads((tmp_path / "deploy.json").read_text())
    megabytes, max_kl = LIMITS[target]
    assert found["size_bytes"] < megabytes * 1e6
    if max_kl is not None:
        assert found["check"]["mean_kl"] < max_kl
    prompt_T = np.array(load_tokenizer(smollm2).encode("The capital of France is"), np.int32)
    greedy = Sampling(max_tokens=2)
    answer = list(load_target(target).load(tmp_path).generate([prompt_T], greedy))
    assert answer == list(load_parent(smollm2).generate([prompt_T], greedy))
