"""Recipes from TOML: every fault with its line, all of them at once, overrides on top."""

from dataclasses import fields, is_dataclass
from typing import get_type_hints

import pytest

from pippin.errors import RecipeError, UsageError
from pippin.recipe import Recipe
from pippin.recipe_file import load_recipe
from pippin.recipe_limits import LIMITS, Range, limit
from pippin.recipe_lines import key_lines, line_of

GOOD = """\
seed = 7

[model]
source = "builtin:smollm2"

[data]
source = "rows.jsonl"   # beside this file

[lora]
targets = [
  "q_proj",  # a ] in a comment
  "v_proj",
]

[train]
learning_rate = 1
steps = 10

[gates]
quantized = { max_kl = 0.1, min_top1 = 0.9 }
"""


@pytest.fixture
def recipe(tmp_path):
    """Writes a recipe, with some text replaced, and loads it."""

    def load(*replaced: tuple[str, str], overrides=()):
        text = GOOD
        for old, new in replaced:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "demo.toml"
        path.write_text(text)
        return load_recipe(path, overrides)

    return load


def test_values_defaults_and_place(recipe, tmp_path):
    loaded = recipe()
    assert loaded.seed == 7
    assert loaded.lora.targets == ("q_proj", "v_proj")
    assert loaded.gates.quantized.max_kl == 0.1
    assert loaded.gates.merged.min_top1 == 0.97, "an untouched gate keeps its default"
    assert (loaded.folder, loaded.name) == (tmp_path, "demo")


def test_whole_number_where_a_float_is_wanted(recipe):
    rate = recipe().train.learning_rate
    assert isinstance(rate, float)
    assert rate == 1.0


FAULTS = [
    (
        "seed = 7",
        'seed = 7\ndeploy.targets = ["mps"]',
        '2: deploy.targets: "mps" is not a choice',
        "executorch==1.4.1",
    ),
    ("steps = 10", "stepps = 10", "17: train.stepps: unknown key", "did you mean steps?"),
    ("steps = 10", "rank = 10", "17: train.rank: unknown key", "belongs in [lora]"),
    ("steps = 10", "steps = 0", "17: train.steps: 0 is out of range", "at least 1"),
    ("steps = 10", "steps = true", "17: train.steps: wants a whole number, got true", "quotes"),
    ("steps = 10", "steps = 1.0", "17: train.steps: wants a whole number, got 1.0", "e.g. 16"),
    ("steps = 10", 'steps = "1"', '17: train.steps: wants a whole number, got "1"', "quotes"),
    ("learning_rate = 1", "learning_rate = 0", "16: train.learning_rate: 0 is out", "above 0"),
    ("learning_rate = 1", "learning_rate = nan", "16: train.learning_rate: nan is", "above 0"),
    ("learning_rate = 1", "learning_rate = true", "16: train.learning_rate: wants a num", "2e-4"),
    ('"v_proj"', "3", "10: lora.targets: wants a string, got 3", "quotes"),
    ("[train]", "dropout = 1\n[train]", "15: lora.dropout: 1 is out of range", "below 1"),
    ("[train]", "[trian]", "15: trian: unknown table or key", "did you mean train?"),
    ("min_top1", "min_top", "20: gates.quantized.min_top: unknown key", "did you mean min_top1?"),
    ("min_top1 = 0.9", "min_top1 = 97", "20: gates.quantized.min_top1: 97 is out", "at most 1"),
    ('source = "rows.jsonl"', "", "6: data.source: is required and missing", "file, folder"),
    ("seed = 7", "seed = -1", "1: seed: -1 is out of range", "at least 0"),
    ("steps = 10", 'schedule = "cosin"', '17: train.schedule: "cosin" is not', "mean cosine?"),
    ("[gates]", "[quantize]\nbits = 7\n[gates]", "20: quantize.bits: 7 is not", "2, 3, 4, 5"),
    ("steps = 10", "min_learning_rate = 2", "17: train.min_learning_rate: 2 is above", "below its"),
    (
        "[gates]",
        '[quantize]\nmethod = "rtn"\ntarget_bits = 4\n[gates]',
        "21: quantize.target_bits: bits",
        "best",
    ),
    (
        "[gates]",
        '[quantize]\nmethod = "hqq"\nscheme = "symmetric"\n[gates]',
        "20: quantize.method: hqq",
        "affine",
    ),
    ("steps = 10", "patience = 2", "17: train.patience: counts validations", "train.valid_every"),
    (
        "[data]",
        'attention = "math"\nengine = "mlx"\n[data]',
        "6: model.attention: the engine mlx has one way",
        "torch",
    ),
    (
        "[data]",
        'engine = "jax"\n[quantize]\nmethod = "best"\nrecover_tokens = 9\n[data]',
        "9: quantize.recover_tokens: the engine jax tunes no scales",
        "mlx",
    ),
    (
        "[data]",
        "[quantize]\nrecover_passes = 2\n[data]",
        "7: quantize.recover_passes: there are no rows",
        "recover_tokens",
    ),
    (
        "[data]",
        'engine = "jax"\n[qat]\nsteps = 9\n[data]',
        "8: qat.steps: the engine jax trains no scales of codes",
        "torch",
    ),
    (
        "[data]",
        '[quantize]\nmethod = "hqq"\nscheme = "k"\nbits = 3\ngroup_size = 32\n[data]',
        "7: quantize.method: hqq moves zero points",
        "affine",
    ),
    (
        "[data]",
        '[quantize]\nscheme = "k"\ngroup_size = 32\n[qat]\nsteps = 9\n[data]',
        "10: qat.steps: scales of scales",
        "affine",
    ),
    (
        "[data]",
        'engine = "jax"\n[quantize]\nmethod = "best"\nmax_kl = 0.1\n[data]',
        "9: quantize.max_kl: the engine jax has no gradients of inputs",
        "torch",
    ),
    (
        "steps = 10",
        "recomputed_layers = 0.5",
        "17: train.recomputed_layers: is a share of what gradient_checkpointing recomputes",
        "train.gradient_checkpointing",
    ),
    (
        "steps = 10",
        'method = "full"\n[quantize]\none_pass = true',
        "19: quantize.one_pass: full fine-tuning has no adapter",
        "leave it out",
    ),
    (
        "steps = 10",
        "[quantize]\none_pass = true\n[gates.merged]\nmax_kl = 0.1",
        "19: gates.merged: no merged model is made",
        "gates.quantized",
    ),
]


@pytest.mark.parametrize(("old", "new", "message", "hint"), FAULTS)
def test_one_fault(recipe, old, new, message, hint):
    with pytest.raises(RecipeError) as caught:
        recipe((old, new))
    assert caught.value.message.startswith(f"demo.toml:{message}")
    assert "\n" not in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.exit_code == 2


def test_all_faults_at_once_in_the_order_of_the_file(recipe):
    with pytest.raises(RecipeError) as caught:
        recipe(("steps = 10", "stepps = 10"), ("seed = 7", "seed = 7.5"))
    first, second = caught.value.message.splitlines()
    assert first.startswith("demo.toml:1: seed:")
    assert second.startswith("demo.toml:17: train.stepps:")
    assert "line 1: " in caught.value.hint
    assert "line 17: did you mean steps?" in caught.value.hint


def test_a_value_where_a_table_is_wanted(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text("model = 7\ndata.source = 'x'\n")
    with pytest.raises(RecipeError, match=r"r\.toml:1: model: wants a table, got 7"):
        load_recipe(path)


def test_missing_tables(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text("seed = 1\n")
    with pytest.raises(RecipeError, match="model: is required") as caught:
        load_recipe(path)
    assert "data: is required" in caught.value.message


@pytest.mark.parametrize(
    ("text", "line"), [("a = 1\nb = = 2\n", 2), ("[model\n", 1), ('x = "', 1), ("a = 1\na = 2", 2)]
)
def test_syntax_error_names_its_line(tmp_path, text, line):
    path = tmp_path / "r.toml"
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert caught.value.message.startswith(f"r.toml:{line}: ")


def test_file_that_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match="no recipe at"):
        load_recipe(tmp_path / "none.toml")
    with pytest.raises(UsageError, match="is a folder"):
        load_recipe(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"name = '\xe9'")
    with pytest.raises(RecipeError, match="not UTF-8"):
        load_recipe(tmp_path / "latin.toml")


def test_overrides(recipe):
    loaded = recipe(
        overrides=["train.steps=3", "model.device=cpu", "lora.targets=['o_proj']", "name = 'x=y'"]
    )
    assert (loaded.train.steps, loaded.model.device) == (3, "cpu")
    assert (loaded.lora.targets, loaded.name) == (("o_proj",), "x=y")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stepps=1", "--set: train.stepps: unknown key"),
        ("train.steps=many", '--set: train.steps: wants a whole number, got "many"'),
        ("seed.x=1", "--set: seed.x: seed is not a table"),
        ("train.steps", "--set train.steps: not KEY=VALUE"),
        ("=1", "--set =1: not KEY=VALUE"),
    ],
)
def test_faulty_overrides(recipe, override, message):
    with pytest.raises(UsageError) as caught:
        recipe(overrides=[override])
    assert message in caught.value.message


def test_what_a_shell_or_an_editor_did_to_a_text(recipe, tmp_path):
    with pytest.raises(RecipeError) as caught:
        recipe(overrides=["deploy.targets=[gguf, hf]", "model.device=gpu"])
    assert 'write ["gguf", "hf"]' in caught.value.hint
    assert "an NVIDIA card is cuda" in caught.value.hint
    text = '[model]\nsource = "m"\n[data]\nsource = "d"\n'
    (tmp_path / "marked.toml").write_text(text, encoding="utf-8-sig")
    assert load_recipe(tmp_path / "marked.toml").model.source == "m"


def test_an_override_may_repair_the_file(recipe):
    assert recipe(("steps = 10", "steps = 0"), overrides=["train.steps=1"]).train.steps == 1


def test_lines_of_keys():
    text = (
        'a = """\nb = 1\n"""\n"q k".\'x.y\' = [ # [\n  { c = 1 }, "]",\n]\n\n[t.u] # ]\nv.w = 1\n'
    )
    lines = key_lines(text)
    assert lines["a",] == 1
    assert lines["q k", "x.y"] == 4
    assert lines["t", "u"] == 8
    assert lines["t", "u", "v", "w"] == 9
    assert ("b",) not in lines
    assert line_of(lines, ("q k", "x.y", "c")) == 4, "inside an inline table: its statement's line"
    assert line_of(lines, ("nowhere",)) == 1


def test_every_number_has_a_range():
    """A number without a declared range is a forgotten check."""
    unlimited = [".".join(path) for path in _numbers(Recipe, ()) if limit(path) is None]
    assert unlimited == []
    known = {
        ".".join(("gates", "*", *p[2:]) if p[0] == "gates" else p) for p in _numbers(Recipe, ())
    }
    assert set(LIMITS) == known, "a range for a key that does not exist"


def _numbers(cls, path):
    hints = get_type_hints(cls)
    for spec in fields(cls):
        kind = hints[spec.name]
        if is_dataclass(kind):
            yield from _numbers(kind, (*path, spec.name))
        elif kind in (int, float, int | None, float | None):
            yield (*path, spec.name)


def test_defaults_lie_in_their_ranges(recipe):
    loaded = recipe()
    for path in _numbers(Recipe, ()):
        value = loaded
        for name in path:
            value = getattr(value, name)
        assert value is None or limit(path).holds(value), path


def test_ranges_in_words():
    assert str(Range(at_least=0, below=1)) == "at least 0 and below 1"
    assert not Range(at_least=0).holds(float("nan"))
