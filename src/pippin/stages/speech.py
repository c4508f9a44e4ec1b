"""Token ids to text as they come, and conversations that fit a context."""

from collections.abc import Callable, Sequence
from typing import Any

from pippin.errors import DataError
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
                f"the prompt is {needed} tokens long, there is room for {room}",
                "shorten it, or lower --max-tokens",
            )
        turns = turns[later[0] :]
    return head + turns
