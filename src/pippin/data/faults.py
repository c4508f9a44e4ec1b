"""Reads many rows and tells of all that cannot be used, not of the first alone."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from pippin.errors import DataError

Item = TypeVar("Item")
Made = TypeVar("Made")

NAMED = 5


def every(make: Callable[[Item], Made], items: Iterable[Item]) -> list[Made]:
    """`make` of each item. Raises one DataError for all that `make` refuses: five are named."""
    made, faults = [], []
    for item in items:
        try:
            made.append(make(item))
        except DataError as error:
            faults.append(error)
    if faults:
        more = len(faults) - NAMED
        lines = [fault.message for fault in faults[:NAMED]]
        lines += [f"and {more:,} more"] if more > 0 else []
        hints = dict.fromkeys(fault.hint for fault in faults[:NAMED])
        raise DataError("\n".join(lines), "; ".join(hints)) from faults[0]
    return made
