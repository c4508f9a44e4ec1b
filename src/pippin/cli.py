"""The `pippin` command's entry: help without imports, then click; errors become two lines.

Commands are in commands.py; this file turns their errors into exit codes. Nothing heavy is
imported here, so that `pippin --help` answers at once.
"""

import os
import signal
import sys
from types import FrameType

from pippin.errors import PippinError

COMMANDS = {
    "check": "whether this device computes what it should, before anything is trained on it",
    "run": "every stage of a recipe, from the model to the deployed file",
    "plan": "what a run will do, need and refuse, before any work",
    "data": "the rows as the model sees them: trained tokens, lengths, what is cut",
    "train": "train the adapter (or every weight)",
    "merge": "merge the adapter into the original weights",
    "quantize": "make the merged model small",
    "evaluate": "measure every stage that is there against its parent",
    "deploy": "write the files that leave this machine",
    "generate": "answer one prompt with a model, a stage's folder or a recipe's result",
    "chat": "talk with it",
    "report": "write report.html of a run again",
    "version": "pippin's version and those of what it runs on",
}


def main() -> None:
    """Run the command line; leaves through sys.exit with the code of errors.py."""
    signal.signal(signal.SIGTERM, _terminate)
    arguments = sys.argv[1:]
    try:
        if arguments in ([], ["--help"], ["-h"]):
            print(help_text())
        else:
            _click(arguments)
        sys.stdout.flush()
    except PippinError as error:
        _fail(error.message, error.hint, error.exit_code)
    except KeyboardInterrupt:
        _fail("stopped", "the same command goes on where it was", 130)
    except PermissionError as error:
        what = error.filename or "a file"
        _fail(f"no permission for {what}", "look at its owner and its permissions: ls -l", 1)
    except BrokenPipeError:
        # The reader of our output has gone; Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def sentence(name: str) -> str:
    """What a command does, as its own help says it."""
    return COMMANDS[name][0].upper() + COMMANDS[name][1:] + "."


def help_text() -> str:
    """What `pippin --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        (
            "Usage: pippin COMMAND [OPTIONS] ...",
            "",
            "Adapt an open language model, shrink it, ship it, and prove that nothing was lost.",
            "",
            *lines,
            "",
            "`pippin COMMAND --help` explains one. A first run: pippin run recipes/sql.toml",
        )
    )


def _click(arguments: list[str]) -> None:
    import click

    from pippin.commands import pippin

    try:
        pippin.main(arguments, prog_name="pippin", standalone_mode=False)
    except click.ClickException as error:
        command = getattr(getattr(error, "ctx", None), "command_path", None) or "pippin"
        _fail(error.format_message().rstrip("."), f"see `{command} --help`", 2)
    except click.Abort:
        raise KeyboardInterrupt from None


def _terminate(number: int, frame: FrameType | None) -> None:
    """SIGTERM is a polite Ctrl-C: checkpoint, then leave."""
    raise KeyboardInterrupt


def _fail(message: str, hint: str, code: int) -> None:
    """The two lines of every failure; plain text, as it may come before any console."""
    first, *rest = message.splitlines()
    lines = [f"error: {first}", *(f"       {line}" for line in rest), f"hint: {hint}"]
    print("\n".join(lines), file=sys.stderr)
    sys.exit(code)
