"""Which line of a TOML text sets which key: a small scan, for error messages."""

import re
import tomllib
from collections.abc import Iterator
from typing import Any

Keys = tuple[str, ...]

_PIECE = re.compile(
    r'"""(?:\\.|[^\\])*?"""'  # strings over several lines, before the short ones
    r"|'''.*?'''"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'"
    r"|#[^\n]*"
    r"|[\[\]{}\n]",
    re.DOTALL,
)
_KEY = re.compile(r"""((?:"(?:\\.|[^"\\])*"|'[^']*'|[^="'#])+)=""")


def key_lines(text: str) -> dict[Keys, int]:
    """The line (from 1) of every table and key of a valid TOML text.

    Keys inside an inline table have no entry of their own; use `line_of`.
    """
    lines: dict[Keys, int] = {}
    table: Keys = ()
    for line, statement in _statements(text):
        if statement.startswith("["):
            keys = table = _path(statement)
        elif match := _KEY.match(statement):
            keys = (*table, *_path(f"{match[1]} = 0"))
        else:
            continue
        for depth in range(1, len(keys) + 1):
            lines.setdefault(keys[:depth], line)
        lines[keys] = line
    return lines


def line_of(lines: dict[Keys, int], keys: Keys) -> int:
    """The line of a key, of the nearest table around it, or the first line."""
    while keys and keys not in lines:
        keys = keys[:-1]
    return lines.get(keys, 1)


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Logical lines: a value may go on over several lines inside brackets and strings."""
    start = depth = 0
    text += "\n"
    for piece in _PIECE.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(piece[0], 0)
        if piece[0] == "\n" and depth == 0:
            statement = text[start : piece.start()].strip()
            if statement and not statement.startswith("#"):
                yield text.count("\n", 0, start) + 1, statement
            start = piece.end()


def _path(statement: str) -> Keys:
    """The key that a header or an assignment of 0 names, in its parts."""
    node: Any = tomllib.loads(statement)
    keys: list[str] = []
    while node:
        if isinstance(node, list):
            node = node[0]
        else:
            key, node = next(iter(node.items()))
            keys.append(key)
    return tuple(keys)
