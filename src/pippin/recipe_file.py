"""From a TOML file to a Recipe; every fault as `file:line: key: what`, all of them in one error."""

import difflib
import tomllib
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pippin.errors import RecipeError, UsageError
from pippin.recipe import TABLES, Recipe
from pippin.recipe_limits import contradictions, limit
from pippin.recipe_lines import Keys, key_lines, line_of

NOT_KEYS = {"folder"}  # fields of Recipe that a file does not set
_NO_MPS = (
    "ExecuTorch 1.5 took its MPS backend out; executorch-mlx uses the same GPUs. An app that has "
    "MPS built in takes a file exported on a Mac with executorch==1.4.1, from the folder that "
    "target hf writes"
)
# Targets that people ask for and that are gone, with the way out.
GONE = {"executorch-mps": _NO_MPS, "mps": _NO_MPS}


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a TOML file, with `table.key=value` overrides put on top.

    Raises RecipeError with every fault of the file, UsageError for a file that cannot be read.
    """
    text = _read(path)
    reader = _Reader(file=path.name, lines=_lines(path, text))
    tree = tomllib.loads(text)
    for override in overrides:
        _override(tree, override, reader)
    recipe = reader.table(Recipe, tree, ())
    if recipe is not None:
        for keys, what, hint in contradictions(recipe):
            reader.fault(keys, what, hint)
    reader.finish()
    assert recipe is not None
    return replace(recipe, folder=path.parent, name=recipe.name or path.stem)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except IsADirectoryError:
        raise UsageError(f"{path} is a folder", "give a recipe file, e.g. recipe.toml") from None
    except FileNotFoundError:
        raise UsageError(f"no recipe at {path}", "check the path; `ls *.toml`") from None
    except PermissionError:
        raise UsageError(f"no permission to read {path}", f"chmod u+r {path}") from None
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"{path.name}:1: byte {error.start} is not UTF-8", "save the recipe as UTF-8 text"
        ) from None


def _lines(path: Path, text: str) -> dict[Keys, int]:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        what, line = _syntax(str(error), text)
        raise RecipeError(
            f"{path.name}:{line}: {what}", "recipes are TOML: https://toml.io"
        ) from None
    return key_lines(text)


def _syntax(message: str, text: str) -> tuple[str, int]:
    """tomllib's `what (at line 3, column 4)` as (what, 3)."""
    what, _, where = message.rpartition(" (at ")
    if not what or not where.startswith("line "):
        return (what or message), text.count("\n") + 1
    return what, int(where.removeprefix("line ").split(",")[0])


def _override(tree: dict[str, Any], override: str, reader: "_Reader") -> None:
    """Put `a.b=value` into the tree; a value that is no TOML is taken as a string."""
    name, equals, value = override.partition("=")
    keys = tuple(part.strip() for part in name.split("."))
    if not equals or not all(keys):
        raise UsageError(f"--set {override}: not KEY=VALUE", "e.g. --set train.steps=10")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    for depth, key in enumerate(keys[:-1], start=1):
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            reader.overrides.add(keys)
            reader.fault(keys, f"{'.'.join(keys[:depth])} is not a table", "see the reference page")
            return
    tree[keys[-1]] = parsed
    reader.overrides.add(keys)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fault:
    line: int  # 0 for the command line
    text: str
    hint: str


@dataclass
class _Reader:
    """Turns tables into dataclasses and gathers the faults."""

    file: str
    lines: dict[Keys, int]
    overrides: set[Keys] = field(default_factory=set)
    faults: list[_Fault] = field(default_factory=list)

    def fault(self, keys: Keys, what: str, hint: str) -> None:
        """Note that a key is wrong."""
        line = 0 if keys in self.overrides else line_of(self.lines, keys)
        where = f"{self.file}:{line}" if line else "--set"
        text = f"{where}: {'.'.join(keys)}: {what}"
        self.faults.append(_Fault(line=line, text=text, hint=hint))

    def finish(self) -> None:
        """Raise one error with all the faults, in the order of the file."""
        faults = sorted(self.faults, key=lambda fault: fault.line)
        if len(faults) == 1:
            raise RecipeError(faults[0].text, faults[0].hint)
        if faults:
            hints = (f"{f'line {f.line}' if f.line else '--set'}: {f.hint}" for f in faults)
            raise RecipeError("\n".join(f.text for f in faults), "; ".join(hints))

    def table(self, cls: Any, tree: Any, keys: Keys) -> Any:
        """An instance of `cls`, or None when something in it is wrong."""
        if not isinstance(tree, dict):
            return self.fault(keys, f"wants a table, got {_show(tree)}", f"[{'.'.join(keys)}]")
        known = {f.name: f for f in fields(cls) if f.name not in NOT_KEYS}
        hints = typing.get_type_hints(cls)
        before = len(self.faults)
        for name in tree.keys() - known.keys():
            self._unknown(name, known, keys)
        self._required(tree, known, keys)
        values = {
            name: self.value(hints[name], tree[name], (*keys, name))
            for name in known
            if name in tree
        }
        return None if len(self.faults) > before else cls(**values)

    def _unknown(self, name: str, known: dict[str, Field[Any]], keys: Keys) -> None:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        elsewhere = [table for table in TABLES if name in _field_names(table)]
        hint = f"{'.'.join(keys) or 'a recipe'} has {', '.join(sorted(known))}"
        if elsewhere:
            hint = f"{name} belongs in [{elsewhere[0]}]"
        if near:
            hint = f"did you mean {near[0]}?"
        self.fault((*keys, name), "unknown key" if keys else "unknown table or key", hint)

    def _required(self, tree: dict[str, Any], known: dict[str, Field[Any]], keys: Keys) -> None:
        for name, spec in known.items():
            if spec.default is MISSING and spec.default_factory is MISSING and name not in tree:
                doc = spec.metadata.get("doc", f"a [{name}] table with `source`")
                self.fault((*keys, name), "is required and missing", f"add it: {doc}")

    def value(self, kind: Any, value: Any, keys: Keys) -> Any:
        """`value` as the type `kind`; faults are noted, and None returned."""
        kind = _not_none(kind)
        if is_dataclass(kind):
            return self.table(kind, value, keys)
        if typing.get_origin(kind) is tuple:
            return self._tuple(typing.get_args(kind)[0], value, keys)
        if typing.get_origin(kind) is Literal:
            return self._choice(typing.get_args(kind), value, keys)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            return self.fault(keys, f"wants {_NAMES[kind]}, got {_show(value)}", _EXAMPLES[kind])
        return self._within(value, keys)

    def _within(self, value: Any, keys: Keys) -> Any:
        allowed = limit(keys) if type(value) in (int, float) else None
        if allowed is not None and not allowed.holds(value):
            return self.fault(keys, f"{value:g} is out of range", f"it must be {allowed}")
        return value

    def _tuple(self, item: Any, value: Any, keys: Keys) -> Any:
        if not isinstance(value, list):
            return self.fault(keys, f"wants a list, got {_show(value)}", _as_list(value))
        return tuple(self.value(item, v, keys) for v in value)

    def _choice(self, choices: tuple[Any, ...], value: Any, keys: Keys) -> Any:
        if any(type(value) is type(c) and value == c for c in choices):
            return value
        near = difflib.get_close_matches(str(value), [str(c) for c in choices], n=1)
        listing = "one of " + ", ".join(str(c) for c in choices)
        hint = f"did you mean {near[0]}? It is {listing}" if near else f"it is {listing}"
        if keys == ("deploy", "targets"):
            hint = GONE.get(str(value), hint)
        if value == "gpu":
            hint = "an NVIDIA card is cuda, an Apple GPU mps"
        return self.fault(keys, f"{_show(value)} is not a choice", hint)


_NAMES = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}
_EXAMPLES = {
    str: 'strings stand in quotes: "text"',
    int: "e.g. 16, without quotes or a decimal point",
    float: "e.g. 2e-4, without quotes",
    bool: "write true or false, without quotes",
}


def _as_list(value: Any) -> str:
    """How a value that should be a list is written; a shell takes quotes away."""
    texts = str(value).strip("[]").split(",") if isinstance(value, str) else ["a", "b"]
    listed = ", ".join(f'"{text.strip()}"' for text in texts)
    return f"write [{listed}]; on a command line the whole of --set in single quotes"


def _field_names(table: str) -> set[str]:
    return {f.name for f in fields(typing.get_type_hints(Recipe)[table])}


def _not_none(kind: Any) -> Any:
    """`X | None` as X: TOML has no null, an absent key means None."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return next(k for k in typing.get_args(kind) if k is not type(None))
    return kind


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a table"
    text = repr(value) if not isinstance(value, str) else f'"{value}"'
    return text if len(text) <= 60 else text[:57] + "..."
