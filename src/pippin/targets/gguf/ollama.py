"""Ollama's Modelfile: the chat template in Go's template language, stop texts, parameters.

Ollama runs no Jinja. A chat template is asked for a few conversations; where what it writes around
each turn depends on the turn's role alone, those texts make the same template in Go
(https://github.com/ollama/ollama/blob/main/docs/modelfile.mdx).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pippin.errors import DataError
from pippin.model.tokenizer import Message, Tokenizer

FILE = "Modelfile"
# Sampling defaults of a model under Ollama's names.
_PARAMETERS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "repetition_penalty": "repeat_penalty",
}
_SYSTEM = {"role": "system", "content": "Say yes."}
_TURNS = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Três, 四?"},
    {"role": "assistant", "content": "Fünf."},
    {"role": "user", "content": "Six?"},
]
_PROBES = [_TURNS[:1], _TURNS[:3], _TURNS, [_SYSTEM, *_TURNS[:1]], [_SYSTEM, *_TURNS]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """What a template writes: before a first turn of no system's, around each turn, at the end.

    `system` is None where the template knows no system turn; what follows a system's turn takes the
    place of what goes before the user's.
    """

    opening: str
    system: tuple[str, str] | None
    user: tuple[str, str]
    assistant: tuple[str, str]
    prompt: str

    def render(self, messages: Sequence[Message]) -> str:
        """A conversation as the Go template renders it."""
        text, before = "", None
        for message in messages:
            role = message["role"]
            opens, closes = getattr(self, role)
            if before is None and role != "system":
                text += self.opening
            text += ("" if before == "system" else opens) + message["content"] + closes
            before = role
        return text + self.prompt

    def go(self) -> str:
        """The Go template."""
        parts = ["{{ range $i, $m := .Messages }}"]
        if self.system:
            opens, closes = map(_literal, self.system)
            parts.append(
                '{{ if eq .Role "system" }}' + f"{opens}{{{{ .Content }}}}{closes}" + "{{ else }}"
            )
        parts.append("{{ if eq $i 0 }}" + _literal(self.opening) + "{{ end }}")
        after_system = 'and (eq $i 1) (eq (index $.Messages 0).Role "system")'
        user, assistant = [tuple(map(_literal, pair)) for pair in (self.user, self.assistant)]
        parts += [
            '{{ if eq .Role "user" }}{{ if not (' + after_system + ") }}" + user[0] + "{{ end }}",
            "{{ .Content }}" + user[1],
            '{{ else if eq .Role "assistant" }}' + assistant[0] + "{{ .Content }}" + assistant[1],
            "{{ end }}" + ("{{ end }}" if self.system else "") + "{{ end }}",
        ]
        return "".join(parts) + _literal(self.prompt)


def modelfile(
    weights: str, tokenizer: Tokenizer, context: int, generation: Mapping[str, Any]
) -> str | None:
    """The file's text; None where the chat template is more than texts around turns.

    `generation` are the model's own defaults, temperature 0 where it has none.
    """
    turns = find_turns(tokenizer) if tokenizer.has_template else None
    if tokenizer.has_template and turns is None:
        return None
    template = turns.go() if turns else "{{ .Prompt }}"
    asked = {"temperature": 0} | {k: v for k, v in generation.items() if v is not None}
    stops = [tokenizer.decode([token]) for token in sorted(tokenizer.stop_ids)]
    parameters = [
        ("num_ctx", context),
        *((theirs, asked[ours]) for ours, theirs in _PARAMETERS.items() if ours in asked),
        *(("stop", f'"{text}"') for text in stops),
    ]
    lines = [f"FROM ./{weights}", f'TEMPLATE """{template}"""']
    lines += [f"PARAMETER {name} {value}" for name, value in parameters]
    return "\n".join(lines) + "\n"


def find_turns(tokenizer: Tokenizer) -> Turns | None:
    """What the chat template writes around turns; None where that is not all it does."""
    turns = _guess(tokenizer)
    if turns is None or '"""' in turns.go():
        return None
    probes = [p for p in _PROBES if turns.system or p[0]["role"] != "system"]
    wanted = [_rendered(tokenizer, probe) for probe in probes]
    return turns if [turns.render(probe) for probe in probes] == wanted else None


def _guess(tokenizer: Tokenizer) -> Turns | None:
    """Read off conversations of two and three turns and one with a system; all may be wrong."""
    first, second, third = (turn["content"] for turn in _TURNS[:3])
    told = _rendered(tokenizer, _TURNS[:3])
    ended = _rendered(tokenizer, _TURNS[:3], generation_prompt=False)
    cut, closes = list(_between(told, (first, second, third))), ended.rpartition(third)[2]
    if len(cut) != 4 or not (told.startswith(ended) and cut[1].startswith(closes)):
        return None
    answered = _rendered(tokenizer, _TURNS[:2], generation_prompt=False)
    assistant = cut[1].removeprefix(closes), answered.rpartition(second)[2]
    opens = cut[2].removeprefix(assistant[1])
    if not cut[0].endswith(opens):
        return None
    system = _rendered(tokenizer, [_SYSTEM, *_TURNS[:1]])
    around = list(_between(system, (_SYSTEM["content"], first)))
    return Turns(
        opening=cut[0].removesuffix(opens),
        system=(around[0], around[1]) if len(around) == 3 else None,
        user=(opens, closes),
        assistant=assistant,
        prompt=told.removeprefix(ended),
    )


def _rendered(
    tokenizer: Tokenizer, messages: Sequence[Message], generation_prompt: bool = True
) -> str:
    """As the template writes it, "" where it refuses; without what llama.cpp puts first itself."""
    try:
        text = tokenizer.render_text(messages, generation_prompt=generation_prompt)
    except DataError:
        return ""
    return text.removeprefix(tokenizer.decode(tokenizer.prefix)) if tokenizer.prefix else text


def _between(text: str, contents: Sequence[str]) -> Iterator[str]:
    """The texts before, between and after the contents; fewer where one is missing."""
    for content in contents:
        before, found, text = text.partition(content)
        if not found:
            return
        yield before
    yield text


def _literal(text: str) -> str:
    """A text that stands for itself in a Go template."""
    return text.replace("{{", '{{ "{{" }}')
