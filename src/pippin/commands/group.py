"""The group of all commands: our own help, and a near name for one that is mistyped."""

import difflib
import os

import click

from pippin.verbs import COMMANDS, help_text

STAGE_VERBS = ("train", "merge", "quantize", "qat", "evaluate", "deploy")
# What several processes may be started for.
SHARED = ("run", *STAGE_VERBS, "version")


class CommandGroup(click.Group):
    """Commands in the order of the help."""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(help_text() + "\n")

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        if name not in COMMANDS and near and not name.startswith("-"):
            raise click.UsageError(f"no command {name!r}; did you mean {near[0]!r}?", ctx)
        if os.environ.get("MLX_RANK") and name not in SHARED:
            from pippin.stages.together import alone

            alone(f"`pippin {name}`")
        return super().resolve_command(ctx, args)
