"""The shapes a row may have, and how each becomes a conversation or a text."""

import difflib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pippin.data.files import Record, kind
from pippin.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
USUAL_NAMES = {
    "question": "prompt",
    "query": "prompt",
    "input": "prompt",
    "answer": "completion",
    "response": "completion",
    "output": "completion",
    "target": "completion",
    "chosen": "completion",
    "sql": "completion",
    "content": "text",
    "document": "text",
    "chat": "messages",
    "dialogue": "messages",
    "dialog": "messages",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row of a split: a conversation, or a text to go on with.

    `pair` is the prompt and completion to join where no chat template is used. A `document` longer
    than `data.max_seq_len` is trained in blocks; any other text counts as too long.
    """

    messages: tuple[dict[str, Any], ...] | None = None
    text: str | None = None
    tools: list[Any] | None = None
    where: str = ""
    pair: tuple[str, str] | None = None
    document: bool = False


def shape_of(record: Record) -> str:
    """The format whose keys the record has. Raises DataError with the keys seen."""
    values = record.values
    for name, keys in KEYS.items():
        if all(key in values for key in keys):
            return "messages" if name == "sharegpt" and _speaks_roles(values) else name
    raise _unknown(record)


def to_row(record: Record, shape: str, document: bool = False) -> Row:
    """The record as a row of that format. Raises DataError naming file, line and key."""
    missing = [key for key in KEYS[shape] if key not in record.values]
    if shape == "messages" and missing and "conversations" in record.values:
        missing = []
    if missing:
        seen = ", ".join(record.values) or "none"
        raise DataError(
            f"{record.where}: no {missing[0]!r} in a row read as {shape}; keys seen: {seen}",
            "give every row of the data the same shape, or set data.format",
        )
    row = BUILDERS[shape](record)
    _check_text(row)
    return row if not document else Row(text=row.text, where=row.where, document=True)


def _messages(record: Record) -> Row:
    name = "messages" if "messages" in record.values else "conversations"
    messages = _message_list(record, name)
    return Row(messages=messages, tools=_tools(record), where=record.where)


def _sharegpt(record: Record) -> Row:
    turns = _objects(record, "conversations")
    messages = []
    for number, turn in enumerate(turns, 1):
        speaker = turn.get("from")
        role = SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            raise _bad_role(record, number, speaker, tuple(SHAREGPT_ROLES))
        messages.append({"role": role, "content": _text_of(record, turn.get("value"), "value")})
    system = record.values.get("system")
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": _text_of(record, system, "system")})
    return Row(messages=tuple(messages), tools=_tools(record), where=record.where)


def _prompt_completion(record: Record) -> Row:
    if any(isinstance(record.values[key], list) for key in ("prompt", "completion")):
        turns = _as_turns(record, "prompt", "user") + _as_turns(record, "completion", "assistant")
        return Row(messages=turns, tools=_tools(record), where=record.where)
    question = _text_of(record, record.values["prompt"], "prompt")
    answer = _text_of(record, record.values["completion"], "completion")
    messages = ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
    system = record.values.get("system")
    if system:
        messages = ({"role": "system", "content": _text_of(record, system, "system")}, *messages)
    return Row(
        messages=messages,
        tools=_tools(record),
        where=record.where,
        pair=(f"{system}\n\n{question}" if system else question, answer),
    )


def _instruction(record: Record) -> Row:
    instruction, answer = (_text_of(record, record.values[k], k) for k in ("instruction", "output"))
    extra = _text_of(record, record.values.get("input") or "", "input")
    question = f"{instruction}\n\n{extra}" if extra.strip() else instruction
    parts = [("Instruction", instruction), ("Input", extra), ("Response", "")]
    plain = "\n\n".join(f"### {k}:\n{v}" for k, v in parts if v.strip() or k == "Response")
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    system = record.values.get("system")
    if system:
        messages.insert(0, {"role": "system", "content": _text_of(record, system, "system")})
        plain = f"{system}\n\n{plain}"
    return Row(messages=tuple(messages), where=record.where, pair=(plain, answer))


def _plain_text(record: Record) -> Row:
    return Row(text=_text_of(record, record.values["text"], "text"), where=record.where)


KEYS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "text": ("text",),
}

BUILDERS: dict[str, Callable[[Record], Row]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "prompt_completion": _prompt_completion,
    "instruction": _instruction,
    "text": _plain_text,
}


def _message_list(record: Record, name: str) -> tuple[dict[str, Any], ...]:
    messages = _objects(record, name)
    for number, message in enumerate(messages, 1):
        if message.get("role") not in ROLES:
            raise _bad_role(record, number, message.get("role"), ROLES)
    return tuple(_normal(record, message) for message in messages)


def _normal(record: Record, message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(record, part) for part in content)
    if content is None and message.get("tool_calls"):
        content = ""
    return {**message, "content": _text_of(record, content, "content")}


def _part(record: Record, part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    seen = part.get("type") if isinstance(part, dict) else kind(part)
    raise DataError(
        f"{record.where}: a content part of type {seen!r}: only text can be trained on",
        "remove images and audio from the conversation",
    )


def _as_turns(record: Record, name: str, role: str) -> tuple[dict[str, Any], ...]:
    if isinstance(record.values[name], list):
        return _message_list(record, name)
    return ({"role": role, "content": _text_of(record, record.values[name], name)},)


def _objects(record: Record, name: str) -> list[dict[str, Any]]:
    value = _parsed(record.values[name])
    if not isinstance(value, list) or not value or not all(isinstance(v, dict) for v in value):
        raise DataError(
            f"{record.where}: {name!r} must be a list of turns, this is "
            f"{'an empty list' if value == [] else kind(value)}",
            'write [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]',
        )
    return value


def _parsed(value: Any) -> Any:
    """A list that a CSV cell, or a column of texts, holds as JSON."""
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _tools(record: Record) -> list[Any] | None:
    tools = _parsed(record.values.get("tools"))
    if tools in (None, "", []):
        return None
    if not isinstance(tools, list):
        raise DataError(
            f"{record.where}: 'tools' must be a list of functions, this is {kind(tools)}",
            "write the tools as JSON schemas in a list",
        )
    return tools


def _text_of(record: Record, value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise DataError(
            f"{record.where}: {name!r} must be a text, this is {kind(value)}",
            "put texts in quotes, or remove the row",
        )
    return value


def _check_text(row: Row) -> None:
    texts = [row.text or ""] + [m["content"] for m in row.messages or ()]
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{row.where}: {text[error.start]!r} is half of a character (a lone surrogate)",
                "mend or remove that character; something cut the text in the middle of it",
            ) from error


def _speaks_roles(values: dict[str, Any]) -> bool:
    turns = _parsed(values["conversations"])
    return isinstance(turns, list) and bool(turns) and "role" in turns[0]


def _bad_role(record: Record, number: int, role: Any, known: Sequence[str]) -> DataError:
    near = difflib.get_close_matches(str(role), known, 1)
    return DataError(
        f"{record.where}: turn {number} has the role {role!r}",
        f"did you mean {near[0]!r}?" if near else f"roles are {', '.join(known)}",
    )


def _unknown(record: Record) -> DataError:
    known = sorted({key for keys in KEYS.values() for key in keys})
    renames = []
    for seen in record.values:
        near = difflib.get_close_matches(seen.lower(), known, 1, 0.8)
        meant = near[0] if near else USUAL_NAMES.get(seen.lower())
        if meant and meant not in record.values:
            renames.append(f"{seen!r} -> {meant!r}")
    shapes = "; ".join("/".join(keys) for keys in KEYS.values())
    hint = f"did you mean {', '.join(renames)}? rename the keys" if renames else f"use {shapes}"
    rows = [key for key, value in record.values.items() if _is_rows(value)]
    if rows:
        hint = f"if the rows are the list under {rows[0]!r}, save that list alone"
    return DataError(
        f"{record.where}: unknown row shape; keys seen: {', '.join(record.values) or 'none'}", hint
    )


def _is_rows(value: Any) -> bool:
    """Whether a value looks like the rows themselves: objects with the keys of a shape."""
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and any(all(k in first for k in keys) for keys in KEYS.values())
