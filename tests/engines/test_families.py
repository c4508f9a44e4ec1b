"""A plan tells which engine has no model for a folder, before anything is loaded."""

import json
from dataclasses import replace

import pytest
from tests.tiny_runs import CONFIG, MACHINE, change, make_recipe

from pippin import engines
from pippin.engines import ENGINES, check_family
from pippin.errors import UsageError
from pippin.plan import make_plan
from pippin.run import with_refusals


def folder_of(folder, family):
    (folder / "config.json").write_text(json.dumps({**CONFIG, "model_type": family}))
    return folder


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_has_llama(engine, tmp_path):
    assert check_family(engine, folder_of(tmp_path, "llama")) is None


@pytest.mark.parametrize(
    ("engine", "family", "message"),
    [
        ("jax", "gpt2", "the engine jax has no decoder for gpt2"),
        ("mlx", "bloom", "mlx-lm has no model for bloom"),
        ("mlx", "next.1", "mlx-lm has no model for next.1"),
        ("torch", "vit", "transformers has no causal language model for vit"),
    ],
)
def test_what_an_engine_lacks_is_told(engine, family, message, tmp_path):
    told, hint = check_family(engine, folder_of(tmp_path, family))
    assert message in told
    assert "torch" in hint or engine == "torch"


def test_the_plan_refuses_such_a_model(tmp_path):
    recipe = change(make_recipe(tmp_path), model={"engine": "jax"})
    raw = {**CONFIG, "model_type": "gpt2"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(raw))
    host = replace(MACHINE, engines=("jax",))
    plan = with_refusals(make_plan(recipe, host))
    assert ["no decoder for gpt2" in message for message, _ in plan.refusals] == [True]


def test_a_package_that_an_engine_needs_besides(tmp_path, monkeypatch):
    recipe = change(make_recipe(tmp_path), model={"engine": "mlx"})
    monkeypatch.setitem(engines.PACKAGES, "mlx", ("json", "no_such_package"))
    with pytest.raises(UsageError, match="engine mlx needs the package no_such_package") as caught:
        make_plan(recipe, replace(MACHINE, engines=("mlx",)))
    assert "pip install 'pippin[mlx]'" in caught.value.hint
