"""Writes the reference pages from their only source: the recipe's dataclasses, the CLI's options.

`python -m pippin.reference docs/reference`
"""

import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import click

from pippin.commands import pippin
from pippin.recipe import TABLES, Gate, Recipe
from pippin.recipe_limits import limit
from pippin.verbs import COMMANDS

NOTE = "<!-- Written by `make reference`; edit the source instead. -->"


def main() -> None:
    """Write the pages into the folder given, docs/reference without one."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("docs/reference")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")


def pages() -> dict[str, str]:
    """File name -> text of every generated page."""
    return {"cli.md": "\n".join(_cli()) + "\n", "recipe.md": "\n".join(_recipe()) + "\n"}


def _recipe() -> Iterator[str]:
    yield "# What a recipe may say"
    yield f"\n{NOTE}\n"
    yield "A recipe is a TOML file. An unknown key, a wrong type or a value out of range is an"
    yield "error that names file, line and key. `--set table.key=value` puts a value on top.\n"
    yield "## At the top\n"
    top = [spec for spec in fields(Recipe) if spec.name not in TABLES and spec.name != "folder"]
    yield from _rows(Recipe, top, ())
    for name in TABLES:
        cls = typing.get_type_hints(Recipe)[name]
        yield f"\n## [{name}]\n\n{cls.__doc__}\n"
        if name == "gates":
            yield from _gates(cls)
        else:
            yield from _rows(cls, fields(cls), (name,))


def _gates(cls: Any) -> Iterator[str]:
    yield "Each stage has its own table, e.g. `[gates.quantized]`:\n"
    yield "| stage | judged | default |\n|---|---|---|"
    for spec in fields(cls):
        limits = {f.name: getattr(spec.default, f.name) for f in fields(Gate)}
        default = ", ".join(f"{k} = {v}" for k, v in limits.items() if v is not None) or "none"
        yield f"| `{spec.name}` | {spec.metadata['doc']} | {default} |"
    yield ""
    yield from _rows(Gate, fields(Gate), ("gates", "*"))


def _rows(cls: Any, specs: typing.Sequence[Field[Any]], path: tuple[str, ...]) -> Iterator[str]:
    hints = typing.get_type_hints(cls)
    yield "| key | value | default | |\n|---|---|---|---|"
    for spec in specs:
        if not is_dataclass(hints[spec.name]):
            allowed = limit((*path, spec.name))
            value = type_text(hints[spec.name]) + (
                f", {allowed}" if allowed and str(allowed) else ""
            )
            yield f"| `{spec.name}` | {value} | {_default(spec)} | {spec.metadata['doc']} |"


def type_text(kind: Any) -> str:
    """A type as a reader of TOML thinks of it."""
    if isinstance(kind, types.UnionType):
        return type_text(next(k for k in typing.get_args(kind) if k is not type(None)))
    if typing.get_origin(kind) is Literal:
        return " / ".join(f"`{choice}`" for choice in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return f"list of {type_text(typing.get_args(kind)[0])}"
    return {str: "text", int: "whole number", float: "number", bool: "true or false"}[kind]


def _default(spec: Field[Any]) -> str:
    value = spec.default
    if value is MISSING:
        return "required"
    if value is None or value == "":
        return ""
    if isinstance(value, tuple):
        return f"`[{', '.join(repr(item) for item in value)}]`".replace("'", '"')
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _cli() -> Iterator[str]:
    yield "# The command line"
    yield f"\n{NOTE}\n"
    yield "Results go to stdout, all else to stderr. Exit codes: 0 done; 1 the work could not be"
    yield "done, or a gate was missed; 2 command or recipe cannot be understood; 130 stopped"
    yield "by Ctrl-C or SIGTERM, the work saved. A failure is one `error:` and one `hint:` line.\n"
    yield "| command | what it does |\n|---|---|"
    yield from (f"| [`{name}`](#pippin-{name}) | {what} |" for name, what in COMMANDS.items())
    for name in COMMANDS:
        command = pippin.commands[name]
        yield f"\n## pippin {name}\n\n{command.help}\n"
        yield f"    pippin {name} {usage(command)}".rstrip() + "\n"
        yield from _options(command)


def usage(command: click.Command) -> str:
    """The arguments in capitals, then whether there are options."""
    arguments = [str(p.name).upper() for p in command.params if isinstance(p, click.Argument)]
    options = any(isinstance(p, click.Option) for p in command.params)
    return " ".join([*arguments, *(["[OPTIONS]"] if options else [])])


def _options(command: click.Command) -> Iterator[str]:
    options = [p for p in command.params if isinstance(p, click.Option)]
    if options:
        yield "| option | |\n|---|---|"
        yield from (f"| `{option_text(option)}` | {_help(option)} |" for option in options)


def option_text(option: click.Option) -> str:
    """Its spellings and what it takes, e.g. `--max-tokens N`."""
    names = ", ".join(sorted(option.opts, key=len, reverse=True))
    return names if option.is_flag else f"{names} {option.metavar}"


def _help(option: click.Option) -> str:
    default = f"; default {option.default}" if option.show_default else ""
    return f"{option.help}{default}"


if __name__ == "__main__":
    main()
