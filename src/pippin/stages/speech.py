"""Answers as they come: token ids to text, where they end, conversations that fit a context."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pippin.errors import DataError
from pippin.figures import counted
from pippin.model.tokenizer import Tokenizer

BROKEN = "\ufffd"


class Detokenizer:
    """Turns one token at a time into text, holding back what is not yet whole characters.

    The pieces joined are the decoded answer, but for a last character that was cut off.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # Tokens from `_start` are decoded again with every new one: a tokenizer may write a token
        # differently at the beginning of a text. Those before `_said` are out already.
        self._start = 0
        self._said = 0

    def add(self, token: int) -> str:
        """The text that became certain with this token; may be empty."""
        self._ids.append(token)
        before, now = self._decode(self._said), self._decode(len(self._ids))
        if now.endswith(BROKEN) or len(now) <= len(before):
            return ""
        self._start, self._said = self._said, len(self._ids)
        return now[len(before) :]

    def end(self) -> str:
        """What is left when no more tokens come, without a last character cut in two."""
        return self._decode(len(self._ids))[len(self._decode(self._said)) :].rstrip(BROKEN)

    def _decode(self, stop: int) -> str:
        return self._tokenizer.decode(self._ids[self._start : stop], skip_special=True)


@dataclass(kw_only=True, slots=True)
class Answer:
    """An answer as it comes: iterate over its pieces of text; `tokens` counts while they come.

    `prompt_tokens` is what was asked, `limit` the most tokens that may be answered.
    """

    source: Iterator[int]
    tokenizer: Tokenizer
    prompt_tokens: int
    limit: int
    tokens: int = 0

    def __iter__(self) -> Iterator[str]:
        pieces = Detokenizer(self.tokenizer)
        for token in self.source:
            self.tokens += 1
            if piece := pieces.add(token):
                yield piece
        if piece := pieces.end():
            yield piece

    @property
    def cut(self) -> bool:
        """Whether it ended for want of room, not because the model had said all."""
        return self.tokens >= self.limit


class Until:
    """Passes text on up to the first of the stop texts, holding back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found = False

    def add(self, piece: str) -> str:
        """What may be said now; nothing any more once `found`."""
        if self.found:
            return ""
        text = self._held + piece
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        self.found = bool(places)
        keep = min(places) if places else len(text) - self._pending(text)
        self._held = text[keep:]
        return text[:keep]

    def end(self) -> str:
        """What was held back and became no stop text."""
        return "" if self.found else self._held

    def _pending(self, text: str) -> int:
        """Length of the longest end of the text that a stop text begins with."""
        longest = max(map(len, self._stops), default=1) - 1
        sizes = range(min(longest, len(text)), 0, -1)
        return next((n for n in sizes if any(s.startswith(text[-n:]) for s in self._stops)), 0)


Message = dict[str, Any]


def fit_messages(
    messages: Sequence[Message], length: Callable[[list[Message]], int], room: int
) -> list[Message]:
    """The messages without the oldest exchanges that do not fit in `room` tokens.

    A system message at the head stays, and what is kept begins with a user's turn. Raises DataError
    where the last turn alone does not fit.
    """
    head = [m for m in messages[:1] if m["role"] == "system"]
    turns = list(messages[len(head) :])
    while (needed := length(head + turns)) > room:
        later = [i for i, turn in enumerate(turns) if i and turn["role"] == "user"]
        if not later:
            raise DataError(
                f"the prompt is {counted(needed, 'token')} long, there is room for {room}",
                "shorten it, or lower --max-tokens",
            )
        turns = turns[later[0] :]
    return head + turns
