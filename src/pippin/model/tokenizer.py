"""The tokenizer of a model folder: text to token ids, a conversation to the model's own layout."""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from pippin.errors import DataError, ModelError
from pippin.quiet import quiet_imports

Message: TypeAlias = dict[str, Any]

FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "spiece.model",
    "sentencepiece.bpe.model",
)


class Tokenizer:
    """A model's tokenizer and chat template. Ids are plain ints, below `vocab_size`."""

    def __init__(self, backend: Any, folder: Path, generation_stops: frozenset[int]) -> None:
        self._backend = backend
        self._generation_stops = generation_stops
        self.folder = folder
        self.vocab_size: int = _rows_needed(backend)
        self.bos_id: int | None = backend.bos_token_id
        self.eos_id: int = _end_of_text(backend, generation_stops, folder)
        pad = backend.pad_token_id
        self.pad_id: int = self.eos_id if pad is None else pad

    def encode(self, text: str, special_tokens: bool = False) -> list[int]:
        """Token ids; `special_tokens` adds what the tokenizer adds by itself (often bos)."""
        return self.encode_many([text], special_tokens)[0]

    def encode_many(self, texts: Sequence[str], special_tokens: bool = False) -> list[list[int]]:
        """Token ids of many texts, several times faster than one by one."""
        if not texts:
            return []
        return self._call(texts, special_tokens)["input_ids"]

    def encode_spans(self, text: str) -> list[tuple[int, int]]:
        """First and last+1 character of every token of `encode(text)`."""
        if not self._backend.is_fast:
            raise ModelError(
                f"the tokenizer in {self.folder} cannot tell where its tokens lie in the text",
                "use a model with a tokenizer.json",
            )
        return self._call([text], False, return_offsets_mapping=True)["offset_mapping"][0]

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """The text of token ids, as it stands: no spaces are cleaned up."""
        return self._backend.decode(
            [int(i) for i in ids],
            skip_special_tokens=skip_special,
            clean_up_tokenization_spaces=False,
        )

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Each id as the vocabulary spells it."""
        return self._backend.convert_ids_to_tokens([int(i) for i in ids])

    @property
    def has_template(self) -> bool:
        """Whether the model comes with a chat template."""
        return bool(self._backend.chat_template)

    def template(self, tools: list[Any] | None = None) -> str:
        """The source of the chat template that such a conversation is rendered with."""
        return self._backend.get_chat_template(None, tools)

    def render(
        self,
        messages: Sequence[Message],
        tools: list[Any] | None = None,
        generation_prompt: bool = False,
    ) -> list[int]:
        """The token ids of a conversation in the model's own chat template."""
        return self.encode(self.render_text(messages, tools, generation_prompt))

    def render_text(
        self,
        messages: Sequence[Message],
        tools: list[Any] | None = None,
        generation_prompt: bool = False,
    ) -> str:
        """A conversation as the model's chat template writes it.

        Raises ModelError without a template, DataError where the template refuses the conversation.
        """
        from jinja2 import TemplateError

        if not self.has_template:
            raise ModelError(
                f"the model in {self.folder} has no chat template",
                "use prompt/completion or text rows, or a chat model (often named -Instruct)",
            )
        try:
            return self._backend.apply_chat_template(
                list(messages), tools, add_generation_prompt=generation_prompt, tokenize=False
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise DataError(
                f"the model's chat template refuses the conversation: {error}",
                "look at the row's roles and their order; some templates know no system turn",
            ) from error

    @cached_property
    def prefix(self) -> list[int]:
        """What the tokenizer puts before a text by itself: [bos], or nothing."""
        plain, full = self.encode("a"), self.encode("a", special_tokens=True)
        starts = (i for i in range(len(full)) if full[i : i + len(plain)] == plain)
        return full[: next(starts, 0)]

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """The special and added tokens as text, longest first."""
        added = {*self._backend.all_special_tokens, *self._backend.get_added_vocab()}
        return tuple(sorted((t for t in added if t.strip()), key=len, reverse=True))

    @cached_property
    def end_of_turn(self) -> int | None:
        """The token with which the chat template ends an answer, if it ends it with one."""
        if not self.has_template:
            return None
        question, answer = {"role": "user", "content": "ping"}, "pong"
        try:
            text = self.render_text([question, {"role": "assistant", "content": answer}])
        except DataError:
            return None
        rest = text[text.rindex(answer) + len(answer) :].lstrip() if answer in text else ""
        ends = (token for token in self.special_texts if rest.startswith(token))
        end = next(ends, None)
        return None if end is None else self._backend.convert_tokens_to_ids(end)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an answer: the generation config's, eos, the template's end of turn."""
        end = set() if self.end_of_turn is None else {self.end_of_turn}
        return self._generation_stops | {self.eos_id} | end

    def _call(self, texts: Sequence[str], special_tokens: bool, **options: Any) -> Any:
        return self._backend(
            list(texts),
            add_special_tokens=special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
            **options,
        )


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder.

    Raises ModelError when the folder has none, when it cannot be read, or when it knows more tokens
    than the model's embedding has rows.
    """
    _require_files(folder)
    tokenizer = Tokenizer(_load_backend(folder), folder, _generation_stops(folder))
    rows = _embedding_rows(folder)
    if rows is not None and tokenizer.vocab_size > rows:
        raise ModelError(
            f"the tokenizer in {folder} needs {tokenizer.vocab_size} embedding rows, "
            f"config.json says the model has {rows}",
            "take tokenizer and model from the same place; added tokens need a resized model",
        )
    return tokenizer


def _require_files(folder: Path) -> None:
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder", "give the folder that holds config.json")
    if not any((folder / name).exists() for name in FILES):
        raise ModelError(
            f"the model folder {folder} has no tokenizer",
            "put the tokenizer.json and tokenizer_config.json of the model there",
        )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        _read_json(folder / name)


def _load_backend(folder: Path) -> Any:
    with quiet_imports():
        from transformers import AutoTokenizer
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"the tokenizer in {folder} cannot be loaded: {reason}",
            "download the model's tokenizer files again",
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}", "download that file again") from error


def _generation_stops(folder: Path) -> frozenset[int]:
    ends = _read_json(folder / "generation_config.json").get("eos_token_id")
    if ends is None:
        ends = _read_json(folder / "config.json").get("eos_token_id")
    if ends is None:
        return frozenset()
    return frozenset([ends] if isinstance(ends, int) else ends)


def _embedding_rows(folder: Path) -> int | None:
    config = _read_json(folder / "config.json")
    return config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")


def _rows_needed(backend: Any) -> int:
    return max(backend.get_vocab().values()) + 1


def _end_of_text(backend: Any, generation_stops: frozenset[int], folder: Path) -> int:
    if backend.eos_token_id is not None:
        return backend.eos_token_id
    if generation_stops:
        return min(generation_stops)
    raise ModelError(
        f"the tokenizer in {folder} names no end-of-text token",
        "set eos_token in tokenizer_config.json; without it an answer cannot end",
    )
