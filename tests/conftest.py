"""Fixtures that several folders share: tiny random checkpoints of many architectures."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GEMMA = {
    "sliding_window": 4,
    "query_pre_attn_scalar": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}

# kind -> (transformers' config class, what differs from _SHAPE)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama_bias": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama_head100": ("LlamaConfig", {"head_dim": 10, "num_key_value_heads": 4}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 4}),
    "gemma": ("GemmaConfig", {}),
    "gemma2": (
        "Gemma2Config",
        {**_GEMMA, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": ("Gemma3TextConfig", _GEMMA),
    "cohere": ("CohereConfig", {"logit_scale": 0.25}),
    "granite": ("GraniteConfig", {"logits_scaling": 4.0, "attention_multiplier": 0.2}),
    "gpt_oss": (
        "GptOssConfig",
        {
            "sliding_window": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "mamba2": (
        "Mamba2Config",
        {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 4},
    ),
}


def pytest_configure() -> None:
    """A shell starts background jobs with SIGINT ignored; tests of Ctrl-C need Python's handler."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _brief_gates() -> Iterator[None]:
    """Deployed files are judged on six prompts: all of them would take a minute a file."""
    from pippin.targets.prompts import gate_prompts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "pippin.targets.gate.gate_prompts", lambda t, c, n: gate_prompts(t, c, min(n, 6))
        )
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with a tiny random float32 model of a kind, written by transformers."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = _write(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return make


def _write(kind: str, folder: Path) -> Path:
    import torch
    import transformers

    name, extra = KINDS[kind]
    config = getattr(transformers, name)(**{**_SHAPE, **extra})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in network.parameters():
            if parameter.dim() == 1:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    network.save_pretrained(folder)
    return folder


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """An empty file system of `SMALL_DISK`, a size of the test's module such as "512k"."""
    place = tmp_path / "small"
    place.mkdir()
    size = f"size={request.module.SMALL_DISK}"
    mount = ["mount", "-t", "tmpfs", "-o", size, "pippin-test", str(place)]
    try:
        made = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except OSError:
        made = False
    if not made:
        pytest.skip("mounting a small disk is not allowed here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def pippin(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[Any, str, str]]:
    """Runs a command line in this process: (exit code, stdout, stderr)."""
    from pippin import cli

    def call(*arguments: object) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["pippin", *map(str, arguments)])
        handler = signal.getsignal(signal.SIGTERM)
        code: Any = 0
        try:
            cli.main()
        except SystemExit as leaving:
            code = leaving.code
        finally:
            signal.signal(signal.SIGTERM, handler)
        return code, *capfd.readouterr()

    return call
