"""One source for every name: tables, recipe types, reference pages and options agree."""

import importlib.util
import json
import tomllib
from pathlib import Path
from typing import get_args

import click
import pytest

from pippin import recipe
from pippin.commands import pippin
from pippin.engines import ENGINES
from pippin.quantizers import QUANTIZERS
from pippin.recipe_file import load_recipe
from pippin.reference import option_text, pages, usage
from pippin.stages.gates import MEASURES
from pippin.targets import EXTRAS, TARGETS
from pippin.verbs import COMMANDS

ROOT = Path(__file__).parents[2]
FROZEN = Path(__file__).with_name("options.json")
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))


@pytest.mark.parametrize(
    ("table", "names"),
    [
        (ENGINES, recipe.EngineName),
        (QUANTIZERS, recipe.QuantizerName),
        (TARGETS, recipe.TargetName),
    ],
    ids=["engines", "quantizers", "targets"],
)
def test_table_equals_recipe_type(table, names):
    assert list(table) == list(get_args(names))
    assert list(table) == sorted(table)
    for module in table.values():
        assert importlib.util.find_spec(module), f"{module} is not there"


def test_every_target_has_a_page_and_an_extra():
    pages = {path.stem for path in (ROOT / "docs/how-to").glob("deploy-*.md")}
    assert pages == {f"deploy-{target}" for target in TARGETS}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert EXTRAS.keys() == TARGETS.keys()
    named = {name for extras in EXTRAS.values() for name in extras.split(",")}
    assert named <= project["optional-dependencies"].keys()


def test_every_gate_is_measured():
    assert set(MEASURES) == set(recipe.Gate.__dataclass_fields__)


@pytest.mark.parametrize("page", pages())
def test_reference_is_up_to_date(page):
    written = (ROOT / "docs" / "reference" / page).read_text()
    assert written == pages()[page], "run `make reference`"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_recipes_load(path):
    assert load_recipe(path).name == path.stem


def test_there_are_recipes():
    assert RECIPES


def test_commands_are_those_of_the_help():
    assert list(COMMANDS) == list(pippin.list_commands(click.Context(pippin)))
    assert set(COMMANDS) == set(pippin.commands)


def test_options_are_frozen():
    """A command line is an interface: what changes here is said in CHANGELOG.md."""
    assert options() == json.loads(FROZEN.read_text()), "change options.json with the changelog"


def options() -> dict[str, list[str]]:
    """Each command's arguments and options, as text."""
    listing = {}
    for name, command in pippin.commands.items():
        texts = [option_text(p) for p in command.params if isinstance(p, click.Option)]
        listing[name] = [usage(command), *texts]
    return listing
