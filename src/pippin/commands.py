"""The commands of the command line: parse, call, hand to the console."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from pippin.cli import COMMANDS, help_text

STAGE_VERBS = ("train", "merge", "quantize", "evaluate", "deploy")
REDO = click.Choice(["fetch", *STAGE_VERBS, "all"])


class _Group(click.Group):
    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(help_text() + "\n")

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        import difflib

        name = args[0]
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        if name not in COMMANDS and near and not name.startswith("-"):
            raise click.UsageError(f"no command {name!r}; did you mean {near[0]!r}?", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pippin", message="pippin %(version)s")
def pippin() -> None:
    """Adapt an open language model, shrink it, ship it, and prove that nothing was lost."""


def _recipe_command(name: str, *options: Callable[..., Any]) -> Callable[..., Any]:
    """A command over one recipe, with the options every such command has."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed((*options, _SET, _JSON, _QUIET)):
            function = option(function)
        function = click.argument("recipe", type=click.Path(path_type=Path))(function)
        return pippin.command(name, help=_sentence(name))(function)

    return decorate


def _sentence(name: str) -> str:
    return COMMANDS[name][0].upper() + COMMANDS[name][1:] + "."


_SET = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="override train.steps=10 etc."
)
_JSON = click.option("--json", "as_json", is_flag=True, help="one JSON object a line on stdout")
_QUIET = click.option("--quiet", "-q", is_flag=True, help="results and errors only")
_REDO = click.option(
    "--redo", multiple=True, type=REDO, help="make a finished stage again; may be repeated"
)


@_recipe_command("run", _REDO)
def run(
    recipe: Path, redo: tuple[str, ...], overrides: tuple[str, ...], as_json: bool, quiet: bool
) -> None:
    """Run a whole recipe."""
    _walk(recipe, None, redo, overrides, _mode(as_json, quiet))


@_recipe_command("plan")
def plan(recipe: Path, overrides: tuple[str, ...], as_json: bool, quiet: bool) -> None:
    """Print the plan; exit code 1 where it refuses."""
    from pippin.console import Console

    console = Console(mode=_mode(as_json, quiet))
    made = _plan(recipe, overrides)
    console.plan(made)
    made.raise_refusals()


@_recipe_command("data", click.option("--rows", default=3, show_default=True, help="rows shown"))
def data(recipe: Path, rows: int, overrides: tuple[str, ...], as_json: bool, quiet: bool) -> None:
    """Print rows with their trained tokens marked."""
    raise NotImplementedError


@pippin.command("version", help=_sentence("version"))
def version() -> None:
    """Print versions, one a line."""
    from pippin.run import versions

    for name, number in versions().items():
        click.echo(f"{name} {number}")


def _stage_command(stage: str) -> None:
    @_recipe_command(stage, _REDO)
    def command(
        recipe: Path, redo: tuple[str, ...], overrides: tuple[str, ...], as_json: bool, quiet: bool
    ) -> None:
        _walk(recipe, stage, redo, overrides, _mode(as_json, quiet))


for _stage in STAGE_VERBS:
    _stage_command(_stage)


def _mode(as_json: bool, quiet: bool) -> str:
    return "json" if as_json else "quiet" if quiet else "auto"


def _plan(recipe: Path, overrides: tuple[str, ...]) -> Any:
    from pippin.machine import find_machine
    from pippin.plan import make_plan
    from pippin.recipe_file import load_recipe

    return make_plan(load_recipe(recipe, overrides), find_machine())


def _walk(
    recipe: Path, only: str | None, redo: tuple[str, ...], overrides: tuple[str, ...], mode: str
) -> None:
    from pippin.console import Console
    from pippin.run import run as walk

    plan = _plan(recipe, overrides)
    console = Console(mode=mode)
    console.events(walk(plan, only, redo))
