"""The commands of the command line: parse, call, hand to the console."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pippin.commands.check import ELSEWHERE, check
from pippin.commands.group import STAGE_VERBS, CommandGroup
from pippin.commands.speak import chat, figure, generate, serve
from pippin.verbs import sentence

if TYPE_CHECKING:
    from pippin.console import Console
    from pippin.plan import Plan
    from pippin.recipe import Recipe

REDO = click.Choice(["fetch", *STAGE_VERBS, "all"])
PATH = click.Path(path_type=Path)


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pippin", message="pippin %(version)s")
def pippin() -> None:
    """Adapt an open language model, shrink it, ship it, and prove that nothing was lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What every command over a recipe is asked."""

    recipe: Path
    overrides: tuple[str, ...]
    mode: str

    def load(self) -> "Recipe":
        """The recipe with its overrides."""
        from pippin.recipe_file import load_recipe

        return load_recipe(self.recipe, self.overrides)

    def plan(self) -> "Plan":
        """The recipe's plan on this machine."""
        from pippin.machine import find_machine
        from pippin.plan import make_plan

        return make_plan(self.load(), find_machine())

    def console(self) -> "Console":
        """The printer."""
        from pippin.console import Console

        return Console(mode=self.mode)


def _recipe_command(name: str, *options: Callable[..., Any]) -> Callable[..., Any]:
    """A command over one recipe: called with what was asked, and its own options by name."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(
            recipe: Path, overrides: tuple[str, ...], as_json: bool, quiet: bool, **own: Any
        ) -> None:
            mode = "json" if as_json else "quiet" if quiet else "auto"
            function(Asked(recipe=recipe, overrides=overrides, mode=mode), **own)

        for option in reversed((click.argument("recipe", type=PATH), *options, *_COMMON)):
            call = option(call)
        return pippin.command(name, help=sentence(name))(call)

    return decorate


_COMMON = (
    click.option(
        "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="e.g. --set train.steps=10"
    ),
    click.option("--json", "as_json", is_flag=True, help="one JSON object a line on stdout"),
    click.option("--quiet", "-q", is_flag=True, help="results and errors only"),
)
_REDO = click.option(
    "--redo",
    multiple=True,
    type=REDO,
    metavar="STAGE",
    help=f"make a finished stage again: {', '.join(REDO.choices)}; may be repeated",
)
_COMPARE = click.option(
    "--compare",
    multiple=True,
    type=click.Choice(["2", "3", "4", "5", "6", "8"]),
    metavar="BITS",
    help="measure every method at so many bits side by side; may be repeated",
)


_TARGETS = click.option(
    "--target",
    "targets",
    metavar="A,B",
    help="these formats instead of the recipe's, all from one quantized model",
)


@_recipe_command("run", _REDO)
def run(asked: Asked, redo: tuple[str, ...]) -> None:
    """Run a whole recipe."""
    _walk(asked, None, redo)


@_recipe_command("plan", *ELSEWHERE)
def plan(asked: Asked, **elsewhere: Any) -> None:
    """Print the plan; an error where it refuses."""
    from pippin.counting import count_updates
    from pippin.machine import find_machine
    from pippin.machine.chips import Elsewhere
    from pippin.plan import make_plan
    from pippin.run import done_steps, with_refusals

    recipe, machine = asked.load(), Elsewhere(**elsewhere).machine(find_machine())
    made = with_refusals(make_plan(recipe, machine, count_updates(recipe)))
    asked.console().plan(made, done_steps(made))
    made.raise_refusals()


@_recipe_command("data", figure("rows", 3, click.IntRange(0), "rows shown"))
def data(asked: Asked, rows: int) -> None:
    """Print rows with their trained tokens marked, lengths, and what is cut or dropped."""
    from pippin.data.show import look
    from pippin.model.tokenizer import load_tokenizer
    from pippin.run import fetch_model

    plan, console = asked.plan(), asked.console()
    console.events(fetch_model(plan))
    console.look(look(plan.recipe, load_tokenizer(plan.model), rows))


def _stage_command(stage: str) -> None:
    @_recipe_command(stage, _REDO)
    def command(asked: Asked, redo: tuple[str, ...]) -> None:
        _walk(asked, stage, redo)


for _stage in STAGE_VERBS:
    if _stage not in ("quantize", "deploy"):
        _stage_command(_stage)


@_recipe_command("deploy", _REDO, _TARGETS)
def deploy(asked: Asked, redo: tuple[str, ...], targets: str | None) -> None:
    """Deploy to the recipe's formats, or to those of --target."""
    if targets is not None:
        names = ", ".join(f'"{name.strip()}"' for name in targets.split(","))
        override = f"deploy.targets=[{names}]"
        asked = replace(asked, overrides=(*asked.overrides, override))
    if _walk(asked, "deploy", redo):
        _partitions(asked.plan(), asked.console())


@_recipe_command("quantize", _REDO, _COMPARE)
def quantize(asked: Asked, redo: tuple[str, ...], compare: tuple[str, ...]) -> None:
    """Quantize; with bits to compare, by every method and measure each, beside the recipe's own."""
    if not compare:
        _walk(asked, "quantize", redo)
        return
    from pippin import compare as ways

    plan, console = asked.plan(), asked.console()
    if _follows(plan, console):
        return
    console.header(plan)
    console.events(ways.compare(plan, [int(bits) for bits in compare]))
    console.comparison(ways.comparison(plan.folder))


def _walk(asked: Asked, only: str | None, redo: tuple[str, ...]) -> bool:
    """Run, and print what came of it; whether it was for this process to do so."""
    from pippin.errors import GateError
    from pippin.run import run as walk

    plan, console = asked.plan(), asked.console()
    if _follows(plan, console):
        return False
    console.header(plan)
    try:
        console.events(walk(plan, only, redo))
    except GateError:
        _results(plan, console)
        raise
    if only in (None, "evaluate"):
        _results(plan, console)
    return True


def _follows(plan: "Plan", console: "Console") -> bool:
    """Whether this process helped another one, which is done."""
    from pippin.events import Notice
    from pippin.stages.together import follow

    fault = follow(plan.recipe.model)
    if fault:
        console.notice(Notice(stage="run", text=f"the first process has stopped: {fault}"))
    return fault is not None


def _results(plan: "Plan", console: "Console") -> None:
    from pippin.report import answers_table, summary_table
    from pippin.report.page import REPORT

    rows = summary_table(plan.folder, plan.recipe.gates)
    console.results(rows, answers_table(plan.folder), str(plan.folder / REPORT))


def _partitions(plan: "Plan", console: "Console") -> None:
    from pippin.report.table import partition_line, partition_table, read_json
    from pippin.targets.bundle import DESCRIPTION

    for target in plan.recipe.deploy.targets:
        said = read_json(plan.folder / f"deploy-{target}" / DESCRIPTION)
        if rows := partition_table(said):
            console.partition(rows, f"{target}: {partition_line(said)}")


@_recipe_command("report")
def report(asked: Asked) -> None:
    """Write the report again."""
    from pippin.run import report as write

    plan = asked.plan()
    write(plan)
    _results(plan, asked.console())


@pippin.command("version", help=sentence("version"))
def version() -> None:
    """Print versions, one a line."""
    from pippin.versions import versions

    for name, number in versions().items():
        click.echo(f"{name} {number}")


for _command in (chat, check, generate, serve):
    pippin.add_command(_command)
