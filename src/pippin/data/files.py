"""Data files as records: JSONL, JSON, CSV, TSV, Parquet, plain text; each fault with its line."""

import csv
import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pippin.errors import DataError

DOCUMENT_BREAK = "<|endoftext|>"


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One row of a file as it stands there, and where that is (`file.jsonl:12`)."""

    values: dict[str, Any]
    where: str


def read_records(path: Path) -> list[Record]:
    """All records of one file, by its ending.

    Raises DataError for a missing, empty, truncated, wrongly encoded or broken file.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"{path}: files ending in {path.suffix!r} are not read", f"use {', '.join(READERS)}"
        )
    records = list(reader(path))
    if not records:
        raise DataError(f"{path} holds no rows", "give a file with at least one row")
    return records


def decoded(path: Path) -> str:
    """A text file's contents, without byte order mark, lines ended by a newline alone."""
    raw = _read_bytes(path)
    if not raw.strip():
        raise DataError(f"{path} is empty ({len(raw)} bytes)", "give a file with at least one row")
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(
            f"{path} is UTF-16, not UTF-8",
            f"convert it: iconv -f UTF-16 -t UTF-8 {path.name} > new{path.suffix}",
        )
    if b"\0" in raw:
        line = raw[: raw.index(b"\0")].count(b"\n") + 1
        raise DataError(
            f"{path}:{line}: a NUL byte: this is not a text file, or its end was never written",
            "copy the file again, or convert it to UTF-8",
        )
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise DataError(
            f"{path}:{line}: byte 0x{raw[error.start]:02x} is not UTF-8",
            f"convert it: iconv -f LATIN1 -t UTF-8 {path.name} > new{path.suffix}",
        ) from error


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"there is no file {path}", "look at the path in the recipe") from error
    except PermissionError as error:
        raise DataError(f"no permission to read {path}", "change who may read the file") from error


def _json(path: Path) -> Iterator[Record]:
    text = decoded(path)
    if text.lstrip().startswith("["):
        yield from _json_array(path, text)
    elif path.suffix.lower() == ".json" and (values := _json_object(text)):
        yield Record(values=values, where=f"{path.name}:1")
    else:
        yield from _json_lines(path, text)


def _json_object(text: str) -> dict[str, Any] | None:
    """The one object that a text holds, over however many lines; None where it holds others."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _json_lines(path: Path, text: str) -> Iterator[Record]:
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path.name}:{number}"
        try:
            value = json.loads(line)
        except ValueError as error:
            raise _broken(path, number, error, last=number == len(lines)) from error
        yield Record(values=_whole(value, path, where), where=where)


def _broken(path: Path, line: int, error: ValueError, last: bool) -> DataError:
    if last:
        return DataError(
            f"{path}:{line}: the file ends in the middle of a row",
            "the file looks truncated: copy it again, or delete its last line",
        )
    reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
    column = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
    return DataError(
        f"{path}:{line}: not JSON: {reason}{column}", "each line must be one JSON object"
    )


def _json_array(path: Path, text: str) -> Iterator[Record]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        cut = error.pos >= len(text.rstrip())
        reason = "the file ends in the middle of its array" if cut else f"not JSON: {error.msg}"
        hint = "the file looks truncated: copy it again" if cut else "mend the file at that line"
        raise DataError(f"{path}:{error.lineno}: {reason}", hint) from error
    for number, value in enumerate(values, 1):
        where = f"{path.name} row {number}"
        yield Record(values=_whole(value, path, where), where=where)


def _whole(value: Any, path: Path, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(
            f"{path.parent / where}: a row must be an object, this is {kind(value)}",
            'write rows as {"prompt": ..., "completion": ...}, or another shape of the docs',
        )
    return value


def kind(value: Any) -> str:
    """What a value is, in words that fit JSON."""
    names: dict[type, str] = {
        str: "a text",
        list: "a list",
        dict: "an object",
        bool: "true or false",
        int: "a number",
        float: "a number",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)


def _csv(path: Path) -> Iterator[Record]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    lines = csv.reader(io.StringIO(decoded(path), newline=""), delimiter=delimiter, strict=True)
    try:
        header = [name.strip() for name in next(lines)]
        start = lines.line_num + 1
        _check_delimiter(path, header, delimiter)
        for cells in lines:
            if cells:
                _check_width(path, start, cells, header)
                values = dict(zip(header, cells, strict=True))
                yield Record(values=values, where=f"{path.name}:{start}")
            start = lines.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{path}:{lines.line_num}: not CSV: {error}",
            'a text with commas, quotes or line breaks goes in "...", its quotes doubled',
        ) from error


def _check_delimiter(path: Path, header: list[str], delimiter: str) -> None:
    """Spreadsheets write semicolons or tabs where a comma is the decimal point."""
    other = [mark for mark in (";", "\t") if len(header) == 1 and mark in header[0]]
    if other:
        wanted = "tabs" if delimiter == "\t" else "commas"
        raise DataError(
            f"{path}:1: its cells are parted by {other[0]!r}, not by {wanted}: {header[0]!r}",
            "save it with commas, or with tabs as .tsv",
        )


def _check_width(path: Path, line: int, cells: list[str], header: list[str]) -> None:
    if len(cells) != len(header):
        raise DataError(
            f"{path}:{line}: {len(cells)} cells, the header names {len(header)} columns",
            'a text with commas, quotes or line breaks goes in "...", its quotes doubled',
        )


def _parquet(path: Path) -> Iterator[Record]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(
            f"{path}: Parquet files need pyarrow", "pip install 'pippin[parquet]'"
        ) from error
    if not path.exists() or path.stat().st_size == 0:
        decoded(path)
    try:
        rows = parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowInvalid, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"{path} is not a whole Parquet file: {reason}", "download it again"
        ) from error
    for number, row in enumerate(rows, 1):
        yield Record(values=_without_nulls(row), where=f"{path.name} row {number}")


def _without_nulls(value: Any) -> Any:
    """Parquet gives every row of a column the same keys, null where a row has none."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def _text(path: Path) -> Iterator[Record]:
    """Documents of a plain text file: the whole file, or the parts between break lines."""
    start, lines = 1, decoded(path).split("\n")
    for number, line in enumerate([*lines, DOCUMENT_BREAK], 1):
        if line.strip() == DOCUMENT_BREAK:
            document = "\n".join(lines[start - 1 : number - 1])
            if document.strip():
                yield Record(values={"text": document}, where=f"{path.name}:{start}")
            start = number + 1


READERS: dict[str, Callable[[Path], Iterator[Record]]] = {
    ".jsonl": _json,
    ".ndjson": _json,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
    ".txt": _text,
    ".md": _text,
}

DOCUMENTS = (".txt", ".md")
