"""The `pippin` command's entry: help without imports, then click; errors become two lines.

Commands are in commands/; this file turns their errors into exit codes. Nothing heavy is
imported here, so that `pippin --help` answers at once.
"""

import os
import signal
import sys
from types import FrameType

from pippin.errors import PippinError
from pippin.verbs import help_text


def main() -> None:
    """Run the command line; leaves through sys.exit with the code of errors.py."""
    # What follows another process has nothing to save, and leaves it to that one to say why.
    follows = os.environ.get("MLX_RANK") not in (None, "", "0")
    signal.signal(signal.SIGTERM, signal.SIG_DFL if follows else _terminate)
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


def _click(arguments: list[str]) -> None:
    import click

    from pippin.commands import pippin

    try:
        pippin.main(arguments, prog_name="pippin", standalone_mode=False)
    except click.ClickException as error:
        command = getattr(getattr(error, "ctx", None), "command_path", None)
        command = command or " ".join(["pippin", *arguments[:1]])
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
    if "MLX_RANK" in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of the launcher: it is leaving as it is
    sys.exit(code)
