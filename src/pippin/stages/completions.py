"""What a client of OpenAI's API asks for, checked, and the shapes in which it is answered.

https://platform.openai.com/docs/api-reference/chat
"""

import math
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pippin.engines import Sampling
from pippin.errors import PippinError
from pippin.stages.speech import Answer, Message

Kind = Literal["chat", "text"]
OBJECT = {"chat": "chat.completion", "text": "text_completion"}
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# What is read of a message; who of several users spoke, no template asks.
SAID = {"role", "content", "name"}
# Fields that say nothing about the answer.
UNHEARD = {"model", "user", "metadata", "store", "service_tier", "safety_identifier"}
# Fields whose only value we can honour is the one that changes nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),  # of no tools
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "logit_bias": ({},),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
}


class BadRequest(PippinError):
    """A request that cannot be answered; `param` is the field at fault."""

    def __init__(self, message: str, hint: str, param: str) -> None:
        super().__init__(message, hint)
        self.param = param


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A request in our terms: what was said, how to answer, and in which shape."""

    kind: Kind
    said: str | list[Message]
    sampling: Sampling
    stops: tuple[str, ...]
    stream: bool
    usage: bool


def read_request(kind: Kind, body: Any, defaults: Sampling) -> Asked:
    """A request's JSON as Asked; BadRequest names the field that is wrong or not supported.

    Missing fields are those of `defaults`.
    """
    if not isinstance(body, dict):
        raise BadRequest("the body is no JSON object", "send one", "")
    fields = {key: value for key, value in body.items() if value is not None}
    stream = _take(fields, "stream", False, lambda value: isinstance(value, bool))
    options = _take(fields, "stream_options", {}, lambda value: isinstance(value, dict))
    asked = Asked(
        kind=kind,
        said=_messages(fields) if kind == "chat" else _prompt(fields),
        sampling=_sampling(fields, defaults),
        stops=_stops(fields),
        stream=stream,
        usage=bool(options.get("include_usage")),
    )
    for key, value in fields.items():
        if key not in UNHEARD and not _neutral(key, value):
            raise BadRequest(f"{key} is not supported: {value!r:.60}", "leave it out", key)
    return asked


def _neutral(key: str, value: Any) -> bool:
    """Whether a value asks for nothing. 0 is not false: `logprobs: 0` asks for a number a token."""
    return any(
        value == nothing and isinstance(value, bool) == isinstance(nothing, bool)
        for nothing in NEUTRAL.get(key, ())
    )


def _take(fields: dict[str, Any], key: str, default: Any, valid: Callable[[Any], bool]) -> Any:
    value = fields.pop(key, default)
    if not valid(value):
        raise BadRequest(f"{key} cannot be {value!r:.60}", "see OpenAI's API reference", key)
    return value


def _sampling(fields: dict[str, Any], defaults: Sampling) -> Sampling:
    old = _take(fields, "max_tokens", defaults.max_tokens, _whole(1))
    return replace(
        defaults,
        max_tokens=_take(fields, "max_completion_tokens", old, _whole(1)),
        temperature=_take(fields, "temperature", defaults.temperature, _real(math.inf)),
        top_p=_take(fields, "top_p", defaults.top_p, _real(1.0)),
        seed=_take(fields, "seed", defaults.seed, _whole(0)),
    )


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and value >= least


def _real(most: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and math.isfinite(value) and 0 <= value <= most


def _stops(fields: dict[str, Any]) -> tuple[str, ...]:
    stop = fields.pop("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise BadRequest(f"stop cannot be {stop!r:.60}", "give a text or a list of texts", "stop")
    return tuple(stops)


def _prompt(fields: dict[str, Any]) -> str:
    prompt = fields.pop("prompt", None)
    if not isinstance(prompt, str):
        raise BadRequest("prompt is no text", "one prompt a request, as text", "prompt")
    return prompt


def _messages(fields: dict[str, Any]) -> list[Message]:
    messages = fields.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages is no list of messages", "send one at least", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, where: str) -> Message:
    role = ROLES.get(message.get("role")) if isinstance(message, dict) else None
    if role is None:
        raise BadRequest(f"{where} has no role of {', '.join(ROLES)}", "set its role", where)
    for key, value in message.items():
        if key not in SAID and value not in (None, "", [], {}):
            text = f"{where}.{key} is not supported: {value!r:.60}"
            raise BadRequest(text, "leave it out", where)
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        known = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
        content = "".join(texts) if known else None
    if not isinstance(content, str):
        raise BadRequest(f"{where} has no text for content", "text alone is understood", where)
    return {"role": role, "content": content}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """One answer's place in the API: its id, the model's name, when it was made."""

    asked: Asked
    model: str
    id: str
    created: int

    @classmethod
    def of(cls, asked: Asked, model: str) -> "Shape":
        """A new answer's."""
        prefix = "chatcmpl" if asked.kind == "chat" else "cmpl"
        return cls(
            asked=asked, model=model, id=f"{prefix}-{uuid.uuid4().hex}", created=int(time.time())
        )

    def whole(self, text: str, answer: Answer, reason: str) -> dict[str, Any]:
        """The whole answer at once."""
        said = {"message": {"role": "assistant", "content": text}}
        choice = said if self.asked.kind == "chat" else {"text": text}
        return self._object("", [self._choice(choice, reason)]) | {"usage": usage(answer)}

    def first(self) -> list[dict[str, Any]]:
        """What opens a stream: whose turn it is, in a chat."""
        return [self._chunk({"role": "assistant", "content": ""})] if self._chats else []

    def piece(self, text: str) -> dict[str, Any]:
        """A piece of a stream."""
        return self._chunk({"content": text} if self._chats else text)

    def last(self, answer: Answer, reason: str) -> list[dict[str, Any]]:
        """What closes a stream: why it ended, and the counts where they were asked for."""
        counts = self._object(".chunk", []) | {"usage": usage(answer)}
        return [self._chunk({} if self._chats else "", reason), *([counts] * self.asked.usage)]

    @property
    def _chats(self) -> bool:
        return self.asked.kind == "chat"

    def _chunk(self, delta: Any, reason: str | None = None) -> dict[str, Any]:
        choice = {"delta": delta} if self._chats else {"text": delta}
        return self._object(".chunk", [self._choice(choice, reason)])

    def _choice(self, choice: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {"index": 0, **choice, "logprobs": None, "finish_reason": reason}

    def _object(self, suffix: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = OBJECT[self.asked.kind] + (suffix if self._chats else "")
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices}


def usage(answer: Answer) -> dict[str, int]:
    """Tokens asked and answered."""
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.tokens,
        "total_tokens": answer.prompt_tokens + answer.tokens,
    }


def failure(error: PippinError) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    param = error.param if isinstance(error, BadRequest) else None
    message = f"{error.message} ({error.hint})"
    kind = "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param or None, "code": None}}
