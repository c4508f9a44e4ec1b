"""What a failed probe changes in the plan, and that nothing else does."""

from dataclasses import replace

import pytest

from pippin.caching import cache_folder
from pippin.check import Finding
from pippin.check.record import heed, recall, record
from pippin.errors import UsageError
from pippin.machine import Accelerator, find_machine
from pippin.plan import make_plan
from pippin.recipe_file import load_recipe
from tests.tiny_runs import RECIPE, write_model


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPPIN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def recipe(tmp_path):
    write_model(tmp_path / "model")
    (tmp_path / "tiny.toml").write_text(RECIPE)
    loaded = load_recipe(tmp_path / "tiny.toml")
    return replace(loaded, model=replace(loaded.model, device="auto", dtype="auto"))


def found(probe, avoid, verdict="wrong"):
    return Finding(
        probe=probe,
        verdict=verdict,
        figure=1.0,
        tolerance=0.0,
        detail="",
        remedy="",
        avoid=avoid,
    )


LEAK = found("attention.causality.bfloat16", "attention")
COARSE = found("product.plain.bfloat16", "dtype")
LOST = found("optimizer.step", "device")
COMPILED = found("compile.parity.float32", "compile")


def with_model(recipe, **keys):
    return replace(recipe, model=replace(recipe.model, **keys))


def test_without_a_home_the_way_out_is_told(monkeypatch):
    for name in ("PIPPIN_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # no such user
    with pytest.raises(UsageError, match="no home folder"):
        cache_folder()


def test_without_a_check_nothing_changes(recipe):
    assert heed(recipe, "mps") == (recipe, ())


@pytest.mark.parametrize(
    "finding",
    [
        found("attention.causal.bfloat16", "attention", "inaccurate"),
        COMPILED,  # nothing is compiled on MPS
        found("random.dropout", ""),
        found("attention.causal.float16", "attention"),
    ],
)
def test_what_needs_no_change(recipe, finding):
    record("torch", "mps", [finding])
    assert heed(recipe, "mps") == (recipe, ())


@pytest.mark.parametrize("device", ["mps", "cuda", "cpu"])
def test_wrong_attention_means_plain_products(recipe, device):
    record("torch", device, [LEAK])
    changed, (notice,) = heed(recipe, device)
    assert changed == with_model(recipe, attention="math")
    assert notice == (
        f"check: model.attention is math, as wrong is attention.causality.bfloat16 on {device}"
    )


def test_another_engine_has_no_other_attention(recipe):
    mlx = with_model(recipe, engine="mlx")
    record("mlx", "mps", [LEAK])
    assert heed(mlx, "mps")[0] == with_model(mlx, dtype="float32")


def test_wrong_half_precision_means_float32(recipe):
    record("torch", "mps", [COARSE])
    changed, (notice,) = heed(recipe, "mps")
    assert changed == with_model(recipe, dtype="float32")
    assert notice == "check: model.dtype is float32, as wrong is product.plain.bfloat16 on mps"


def test_wrong_compiled_code_is_not_used(recipe):
    record("torch", "cuda", [COMPILED])
    changed, (notice,) = heed(recipe, "cuda")
    assert changed == replace(recipe, train=replace(recipe.train, compile=False))
    assert notice == "check: train.compile is false, as wrong is compile.parity.float32 on cuda"


def test_more_means_the_cpu(recipe):
    record("torch", "mps", [COARSE, LOST])
    changed, (notice,) = heed(recipe, "mps")
    assert changed.model.device == "cpu"
    assert "optimizer.step on mps" in notice


def test_every_change_is_told(recipe):
    record("torch", "cuda", [LEAK, COARSE, COMPILED])
    changed, notices = heed(recipe, "cuda")
    assert (changed.model.attention, changed.model.dtype) == ("math", "float32")
    assert not changed.train.compile
    assert len(notices) == 3


def test_a_recipe_that_says_otherwise_is_told(recipe):
    record("torch", "mps", [COARSE])
    asked = with_model(recipe, dtype="bfloat16")
    same, (notice,) = heed(asked, "mps")
    assert same == asked
    assert "model.dtype is set to bfloat16; float32 is safe" in notice
    record("torch", "mps", [found("product.plain.float16", "dtype")])
    same, (notice,) = heed(with_model(recipe, dtype="float16"), "mps")
    assert "model.dtype is set to float16; float32 is safe" in notice


def test_findings_end_with_the_version(recipe, monkeypatch):
    record("torch", "mps", [LOST])
    assert recall("torch", "mps")
    monkeypatch.setattr("pippin.check.record._version", lambda engine: "later")
    assert recall("torch", "mps") == []


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"version": 1, "wrong": [{"x": 1}]}'])
def test_a_damaged_record_is_none(recipe, tmp_path, text):
    assert record("torch", "mps", [LOST]) is None
    (tmp_path / "cache" / "check-torch-mps.json").write_text(text)
    assert recall("torch", "mps") == []


def test_a_record_that_cannot_be_kept_is_told(recipe, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PIPPIN_CACHE", str(tmp_path / "file"))
    assert record("torch", "mps", [LOST]) == str(tmp_path / "file" / "check-torch-mps.json")


def test_the_plan_heeds_it(recipe):
    record("torch", "mps", [LOST])
    gpu = Accelerator(kind="mps", name="m", memory_total=2**34, memory_available=2**34)
    plan = make_plan(recipe, replace(find_machine(), accelerator=gpu))
    assert (plan.device, plan.recipe.model.device) == ("cpu", "cpu")
    assert plan.notices == ("check: model.device is cpu, as wrong is optimizer.step on mps",)
