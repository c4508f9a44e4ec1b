"""Validation and test rows set aside from training rows, where the data comes without them."""

import hashlib
from collections.abc import Sequence

from pippin.data.shapes import Row
from pippin.errors import DataError
from pippin.figures import counted

SHARE, MOST = 0.05, 1000


def part_of(rows: Sequence[Row], part: str, parts: Sequence[str]) -> list[Row]:
    """The rows of `part` when `rows` are shared out to `parts`, of which train is the first.

    Each other part gets 5 % of the distinct rows, at least one and at most 1,000, chosen by a hash
    of their contents: equal rows stay together, and the choice does not depend on the order. A
    single document is cut in consecutive pieces at blank lines. Raises DataError with too few rows.
    """
    if len(parts) == 1:
        return list(rows)
    if len(rows) == 1 and rows[0].document:
        return [_piece(rows[0], part, parts)]
    owners = _owners([_key(row) for row in rows], parts)
    if owners is None and part != "train":
        raise DataError(
            f"{rows[0].where}: too few rows to set a {part} split aside",
            f"give more rows, or a file of its own: data.{part}",
        )
    return [row for row in rows if owners is None or owners[_key(row)] == part]


def _owners(keys: Sequence[str], parts: Sequence[str]) -> dict[str, str] | None:
    distinct = sorted(set(keys))
    if len(distinct) < len(parts):
        return None
    size = max(1, min(MOST, round(len(distinct) * SHARE)))
    names = [name for name in parts[1:] for _ in range(size)]
    return {key: names[i] if i < len(names) else "train" for i, key in enumerate(distinct)}


def seen_before(rows: Sequence[Row], train: Sequence[Row], split: str) -> list[str]:
    """In words, how many rows of a held-out split ask what a training row asks; none where none."""
    asked = {_key(row) for row in train}
    same = [row for row in rows if _key(row) in asked]
    if not same:
        return []
    return [
        f"{len(same)} of {counted(len(rows), f'{split} row')} ask what a training row asks, "
        f"{same[0].where} first: their figures tell what was learned by heart"
    ]


def repeated(rows: Sequence[Row]) -> list[str]:
    """In words, how many rows are there more than once; none where none."""
    more = len(rows) - len({_hash((row.messages, row.text)) for row in rows})
    return [f"train: {counted(more, 'row')} said before, word for word"] if more else []


def _key(row: Row) -> str:
    """What is asked; all of it where nobody asks."""
    asked = [m for m in row.messages or () if m["role"] not in ("assistant", "system")]
    told = [m for m in row.messages or () if m["role"] != "assistant"] if asked else row.messages
    return _hash((told, row.text))


def _hash(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _piece(row: Row, part: str, parts: Sequence[str]) -> Row:
    text = row.text or ""
    cuts = [0]
    for number in range(1, len(parts)):
        share = 1 - SHARE * (len(parts) - number)
        cuts.append(_blank_line(text, int(len(text) * share), cuts[-1]))
    cuts.append(len(text))
    place = parts.index(part)
    piece = text[cuts[place] : cuts[place + 1]]
    if not piece.strip():
        raise DataError(
            f"{row.where}: the text is too short to set a {part} split aside",
            f"give more text, or a file of its own: data.{part}",
        )
    line = text[: cuts[place]].count("\n") + int(row.where.rpartition(":")[2])
    where = f"{row.where.rpartition(':')[0]}:{line}"
    return Row(text=piece, where=where, document=True)


def _blank_line(text: str, near: int, after: int) -> int:
    """Where to cut: after the blank line before `near`, else after a line, else at `near`."""
    for mark in ("\n\n", "\n"):
        found = text.rfind(mark, after, near)
        if found > after:
            return found + len(mark)
    return near
