"""Conversations in the model's chat template, and which of their tokens are trained.

A turn is found in the text, then in the tokens, and both are proved: the text before it is what the
model is given when it has to answer, and the tokens are those of the whole conversation. No token
is ever recognized by its id, so padding with the end token does no harm.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pippin.data.shapes import Row
from pippin.errors import DataError
from pippin.model.tokenizer import Message, Tokenizer
from pippin.recipe import TrainOn

MARK = "\N{OBJECT REPLACEMENT CHARACTER}turn\N{OBJECT REPLACEMENT CHARACTER}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A conversation as text, and the character ranges [start, stop) that are trained.

    `answer` is the last of them as a reader sees it, without its end token.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    answer: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Marked:
    """Token ids and which of them are trained. `exact` is false where a token lies across the edge
    of a turn, or where the prompt alone would be tokenized otherwise."""

    ids: list[int]
    scored: NDArray[np.bool_]
    exact: bool = True


def lay_out(row: Row, tokenizer: Tokenizer, train_on: TrainOn) -> Layout:
    """Write a conversation in the model's chat template and locate the turns to train.

    Raises DataError naming the row where a turn cannot be located or nothing is left to train.
    """
    messages = with_objects(row.messages or ())
    _require_tool_template(row, messages, tokenizer)
    try:
        text = tokenizer.render_text(messages, row.tools)
    except DataError as error:
        raise DataError(f"{row.where}: {error.message}", error.hint) from error
    if train_on == "all":
        return Layout(text=text, spans=((0, len(text)),))
    turns = _trained_turns(row, messages, train_on)
    finder = _Finder(row=row, messages=messages, text=text, tokenizer=tokenizer)
    spans = tuple(finder.span(turn) for turn in turns)
    spoken = messages[turns[-1]]["content"]
    answer = spoken if spoken.strip() else _without_end(text[slice(*spans[-1])], tokenizer)
    return Layout(text=text, spans=spans, answer=answer)


def mark(layouts: Sequence[Layout], tokenizer: Tokenizer) -> list[Marked]:
    """Tokenize conversations whole and mark the tokens of their spans.

    Each text is also tokenized in pieces cut at the spans' edges: where the pieces' tokens are
    those of the whole, the edges are exact. Where not, every edge is looked for by itself.
    """
    pieces = [_pieces(layout) for layout in layouts]
    wholes = tokenizer.encode_many([layout.text for layout in layouts])
    parts = iter(tokenizer.encode_many([piece for group in pieces for piece in group]))
    marked = []
    for layout, group, ids in zip(layouts, pieces, wholes, strict=True):
        encoded = [next(parts) for _ in group]
        if [i for part in encoded for i in part] == ids:
            edges = np.cumsum([len(part) for part in encoded]).tolist()
            marked.append(_scored(ids, _in_pairs(edges)))
        else:
            marked.append(_mark_one(layout, ids, tokenizer))
    return marked


def with_objects(messages: Sequence[Message]) -> list[Message]:
    """The messages, tool-call arguments given as JSON text read as the objects templates expect."""
    return [
        {**m, "tool_calls": [_call_with_object(c) for c in m["tool_calls"]]}
        if m.get("tool_calls")
        else m
        for m in messages
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Finder:
    """Locates the turns of one rendered conversation."""

    row: Row
    messages: list[Message]
    text: str
    tokenizer: Tokenizer

    def span(self, turn: int) -> tuple[int, int]:
        """Characters of a turn: all the model has to write, its end token included."""
        prompt = self._render(self.messages[:turn], generation_prompt=True)
        last = turn == len(self.messages) - 1
        whole = self.text if last else self._render(self.messages[: turn + 1])
        if prompt and whole and whole.startswith(prompt) and self.text.startswith(whole):
            return len(prompt), self._without_white_space(len(prompt), len(whole))
        return self._by_mark(turn, prompt)

    def _by_mark(self, turn: int, prompt: str | None) -> tuple[int, int]:
        """The turn between what does not change when its content is replaced.

        Templates that write the last answer differently from earlier ones come here.
        """
        message = self.messages[turn]
        others = [*self.messages]
        others[turn] = {**message, "content": MARK}
        before, found, after = (self._render(others) or "").partition(MARK)
        body = self.text[len(before) : len(self.text) - len(after)]
        same = self.text == before + body + after and body.strip() == message["content"].strip()
        end = self._end_of_turn(after)
        if not (found and body and same and end) or MARK in after:
            raise self._lost(turn)
        stop = len(before) + len(body) + end
        if prompt and before.startswith(prompt):
            return len(prompt), stop
        if before.endswith(self._generation_prompt()):
            return len(before), stop
        raise self._lost(turn)

    def _end_of_turn(self, after: str) -> int:
        """Length of the end token at the start of `after`, 0 where there is none."""
        if self.tokenizer.end_of_turn is None:
            return 0
        token = self.tokenizer.decode([self.tokenizer.end_of_turn])
        space = len(after) - len(after.lstrip())
        return space + len(token) if after[space:].startswith(token) else 0

    def _generation_prompt(self) -> str:
        question = [{"role": "user", "content": "ping"}]
        plain = self._render(question) or ""
        full = self._render(question, generation_prompt=True) or ""
        return full[len(plain) :] if len(full) > len(plain) and full.startswith(plain) else MARK

    def _without_white_space(self, start: int, stop: int) -> int:
        """Leave out the line break after an end token: the model stops before it."""
        turn = self.text[start:stop].rstrip()
        return start + len(turn) if turn.endswith(self.tokenizer.special_texts) else stop

    def _render(self, messages: list[Message], generation_prompt: bool = False) -> str | None:
        if not messages:
            return None
        try:
            return self.tokenizer.render_text(messages, self.row.tools, generation_prompt)
        except DataError:
            return None

    def _lost(self, turn: int) -> DataError:
        last = turn == len(self.messages) - 1
        why = (
            "the chat template does not begin this answer as its generation prompt does"
            if last
            else "the chat template writes it differently once the conversation goes on"
        )
        hint = (
            "write the answer as the template expects it (some want a reasoning block in it)"
            if last
            else 'set data.train_on = "last", and give each answer to train a row that it ends'
        )
        return DataError(
            f"{self.row.where}: turn {turn + 1} (assistant) cannot be located: {why}", hint
        )


def _trained_turns(row: Row, messages: list[Message], train_on: TrainOn) -> list[int]:
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    turns = turns[-1:] if train_on == "last" else turns
    turns = [i for i in turns if messages[i].get("weight", 1) != 0]
    if any(messages[i]["content"].strip() or messages[i].get("tool_calls") for i in turns):
        return turns
    why = "its answer is empty" if turns else "it has no assistant turn to train"
    raise DataError(f"{row.where}: no trainable token in this row: {why}", "mend or remove the row")


def _require_tool_template(row: Row, messages: list[Message], tokenizer: Tokenizer) -> None:
    calls = any(m.get("tool_calls") for m in messages)
    if calls and tokenizer.has_template and "tool_calls" not in tokenizer.template(row.tools):
        raise DataError(
            f"{row.where}: the model's chat template leaves tool_calls out",
            "take a model made for tools, or write the calls into the content",
        )


def _call_with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _without_end(turn: str, tokenizer: Tokenizer) -> str:
    ends = (token for token in tokenizer.special_texts if turn.endswith(token))
    return turn.removesuffix(next(ends, "")).strip()


def _pieces(layout: Layout) -> list[str]:
    """The text cut at every edge: untrained, trained, untrained, ... , rest."""
    edges = [0, *(edge for span in layout.spans for edge in span), len(layout.text)]
    return [layout.text[a:b] for a, b in pairwise(edges)]


def _scored(ids: list[int], spans: Sequence[tuple[int, int]], exact: bool = True) -> Marked:
    scored = np.zeros(len(ids), np.bool_)
    for start, stop in spans:
        scored[start:stop] = True
    scored[:1] = False
    return Marked(ids=ids, scored=scored, exact=exact)


def _mark_one(layout: Layout, ids: list[int], tokenizer: Tokenizer) -> Marked:
    """Mark by the prefixes' tokens, or by where the tokens lie in the text."""
    edges = [edge for span in layout.spans for edge in span]
    heads = [_tokens_before(layout.text[:edge], ids, tokenizer) for edge in edges]
    exact = [head for head in heads if head is not None]
    if len(exact) == len(edges):
        return _scored(ids, _in_pairs(exact))
    starts = np.array([start for start, _ in tokenizer.encode_spans(layout.text)])
    found = [int(np.searchsorted(starts, edge)) for edge in edges]
    return _scored(ids, _in_pairs(found), exact=False)


def _in_pairs(edges: Sequence[int]) -> list[tuple[int, int]]:
    return [(edges[i], edges[i + 1]) for i in range(0, len(edges) - 1, 2)]


def _tokens_before(text: str, ids: list[int], tokenizer: Tokenizer) -> int | None:
    """How many tokens a prefix of the text has, if they are a prefix of the whole's."""
    head = tokenizer.encode(text)
    return len(head) if ids[: len(head)] == head else None
