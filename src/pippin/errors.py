"""The errors a person may see. Each carries what went wrong and the way out.

PippinError                  exit code 1: the work could not be done
├── UsageError               exit code 2: the command or the recipe cannot be understood
│   └── RecipeError          a fault in a recipe, with file:line
├── DataError                a data file or one of its rows
├── ModelError               a model folder, an adapter, a tokenizer
├── GateError                a measured value missed the recipe's gate
└── Interrupted              exit code 130: stopped by the user, work saved
"""

from typing import TypeAlias

Refusal: TypeAlias = tuple[str, str]  # message and hint of an error that a plan foresees


class PippinError(Exception):
    """Something a person can act on: `message` names thing and number, `hint` the way out."""

    exit_code = 1

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[type, Refusal]:
        """From process to process."""
        return type(self), (self.message, self.hint)


class UsageError(PippinError):
    """The command line or the recipe cannot be understood."""

    exit_code = 2


class RecipeError(UsageError):
    """A fault in a recipe; the message starts with `file:line: key:`."""


class DataError(PippinError):
    """A data file, or one row of it, cannot be used."""


class ModelError(PippinError):
    """A model folder, a weights file, an adapter or a tokenizer cannot be used."""


class GateError(PippinError):
    """A measured figure missed the gate the recipe sets for it."""


class Interrupted(PippinError):
    """The user stopped the run; the last checkpoint is on disk."""

    exit_code = 130


def first_line(error: BaseException) -> str:
    """What a library raised, in one line; its repr where it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))
