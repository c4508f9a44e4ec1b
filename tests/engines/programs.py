"""Programs for a process of its own, in a file that imports no framework: starting it is quick."""

import os

from pippin.check.audits import Audited
from pippin.errors import ModelError


def end(_):
    """As a kernel does that aborts."""
    os.abort()


def refuse(_):
    """An error for a person."""
    raise ModelError("no", "yes")


def answer(ask):
    """What it was asked."""
    return [Audited.failed("tiny", "step", f"strict {ask.strict}")]
