"""What the pages show can be typed: recipes load, commands and their options are there."""

import re
import shlex
import textwrap
from pathlib import Path

import click

from pippin.commands import pippin
from pippin.recipe_file import load_recipe

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RECIPE = re.compile(r"^ *```toml\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:^ *|`)pippin ((?!adapts)[a-z][^`\n#|]*)", re.MULTILINE)
NEEDED = {"[model]": 'source = "builtin:smollm2"', "[data]": 'source = "rows.jsonl"'}


def shown(pattern):
    """(page, text) of all that matches in the pages, but for the log, which is history."""
    pages = [page for page in PAGES if page.name != "log.md"]
    return [(page.stem, text) for page in pages for text in pattern.findall(page.read_text())]


def test_recipes_load(tmp_path):
    recipes = shown(RECIPE)
    for page, text in recipes:
        missing = [f"{table}\n{key}\n" for table, key in NEEDED.items() if table not in text]
        path = tmp_path / f"{page}.toml"  # which an error names
        path.write_text("\n".join([textwrap.dedent(text), *missing]))
        load_recipe(path)
    assert len(recipes) > 10


def test_commands_are_there():
    commands = shown(COMMAND)
    for page, text in commands:
        _, command, words = pippin.resolve_command(click.Context(pippin), shlex.split(text))
        known = {name for option in command.params for name in option.opts}
        asked = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert asked <= known, (page, text)
    assert len(commands) > 50
