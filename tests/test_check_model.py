"""`pippin check MODEL`: sizes from a folder or a recipe, the audit by MPS's rules, wrong usage."""

import json
import re

import pytest

from pippin.check import Shapes
from pippin.check.planned import planned_shapes
from tests.tiny_runs import RECIPE, write_model


def test_sizes_of_nothing_a_folder_and_a_recipe(tmp_path):
    write_model(tmp_path / "model")
    (tmp_path / "tiny.toml").write_text(RECIPE)
    assert planned_shapes(None) == (None, Shapes())
    folder, shapes = planned_shapes(tmp_path / "model")
    assert (folder, shapes.kv_heads, shapes.head_dim) == (tmp_path / "model", 1, 4)
    folder, planned = planned_shapes(tmp_path / "tiny.toml")
    text = RECIPE.split("row_tokens")[1]
    assert folder == tmp_path / "model"
    assert planned.length == int(re.search(r"\d+", text)[0])
    assert planned.tokens % planned.length == 0


@pytest.mark.torch
def test_a_folder_by_the_rules_of_mps(pippin, tiny):
    code, out, _ = pippin("check", tiny("llama"), "--as", "mps", "--chip", "m1")
    assert code == 0
    assert re.search(r"fine +fine +fine +fine", out)


@pytest.mark.torch
def test_as_json_with_what_any_chip_gets_wrong(pippin, tiny):
    code, out, _ = pippin("check", tiny("llama"), "--as", "mps", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    step, *rest = [line for line in lines if line["event"] == "audit"]
    assert code == 0
    assert (step["program"], len(rest)) == ("LoRA step", 3)
    assert step["outcome"] == "known wrong"
    assert "pytorch#180776" in step["known_wrong"][0]["why"]
    assert re.search(r"\.py:\d+$", step["known_wrong"][0]["where"])


@pytest.mark.torch
def test_strict_names_file_and_line(pippin, tiny):
    code, _, err = pippin("check", tiny("llama"), "--as", "mps", "--chip", "m5", "--strict")
    assert code == 1
    assert re.search(r"error: known wrong: aten\.linear\S+ \[bfloat16\] at \S+\.py:\d+", err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "--as", "mps"], "nowhere has no config.json"),
        (["--as", "mps"], "--as needs a model"),
        (["--chip", "m1"], "--chip means nothing without --as"),
        (["--strict"], "--strict means nothing without --as"),
        (["--torch", "2.14"], "--torch means nothing without --as"),
        (["--tokens", "3"], "--tokens means nothing without --jax-fuji"),
        (["model", "--as", "mps", "--engine", "mlx"], "--engine means nothing beside --as"),
        (["--jax-fuji", "test", "--chip", "m1"], "--chip means nothing beside --jax-fuji"),
        (["model", "--top50"], "--top50 takes no model"),
        (["model", "--jax-fuji", "test"], "--jax-fuji takes no model"),
        (["--as", "tpu"], "tpu"),
        (["--engine", "abacus"], "abacus"),
    ],
)
def test_wrong_usage_is_two_lines(pippin, arguments, message):
    code, out, err = pippin("check", *arguments)
    assert code in (1, 2)
    assert out == ""
    lines = err.splitlines()
    assert message in lines[0]
    assert [line.partition(":")[0] for line in lines] == ["error", "hint"]


@pytest.mark.torch
def test_a_version_without_rules(pippin, tiny):
    code, _, err = pippin("check", tiny("llama"), "--as", "mps", "--torch", "2.4")
    assert code == 2
    assert "PyTorch 2.4 are not known" in err


def test_a_recipe_whose_model_is_not_here(pippin, tmp_path):
    (tmp_path / "tiny.toml").write_text(RECIPE.replace('"model"', '"someone/something"'))
    code, _, err = pippin("check", tmp_path / "tiny.toml")
    assert code == 1
    assert "not there yet" in err
