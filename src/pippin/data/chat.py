"""Rows as tokens with a loss mask by position, prompts and references for answers.

Shape letters: T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray

from pippin.data.faults import every
from pippin.data.files import DOCUMENTS
from pippin.data.fit import Tokenized, fit
from pippin.data.shapes import Row
from pippin.data.turns import Marked, lay_out, mark, with_objects
from pippin.errors import DataError
from pippin.model.tokenizer import Tokenizer
from pippin.recipe import Data


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A prompt, int32 (T,), and the answer that the data gives for it."""

    prompt_T: NDArray[np.int32]
    answer: str
    where: str


def tokenize(rows: Sequence[Row], tokenizer: Tokenizer, data: Data) -> Tokenized:
    """Every row as token ids and the mask of those that are trained.

    Raises DataError naming the row that has no trainable token, whose turns cannot be located, or
    that is longer than `data.max_seq_len` where `data.too_long` is "error".
    """
    marked = _mark_rows(rows, tokenizer, data)
    for row, one in zip(rows, marked, strict=True):
        if not one.scored.any():
            raise DataError(f"{row.where}: no trainable token in this row", "mend or remove it")
    fitted = fit(rows, marked, data)
    return replace(fitted, notices=fitted.notices + _notices(rows, marked, tokenizer, data))


def examples(rows: Sequence[Row], tokenizer: Tokenizer, data: Data) -> list[Example]:
    """The prompt before each row's last assistant turn, that turn as reference; text gives none."""
    found = []
    for row in rows:
        if row.messages is None:
            continue
        if row.pair and _is_pair(row, tokenizer, data):
            ids, answer = tokenizer.prefix + tokenizer.encode(row.pair[0]), row.pair[1]
        else:
            layout = lay_out(row, tokenizer, "last")
            ids, answer = tokenizer.encode(layout.text[: layout.spans[0][0]]), layout.answer
        prompt_T = np.array(ids, np.int32)
        found.append(Example(prompt_T=prompt_T, answer=answer, where=row.where))
    return found


def render_prompt(prompt: str, tokenizer: Tokenizer, data: Data) -> NDArray[np.int32]:
    """A prompt as int32 (T,): a user's turn that awaits its answer, or a text to go on with.

    It is a plain text for text data, without `data.chat_template`, and without a template.
    """
    document = data.format == "auto" and PurePath(data.source).suffix.lower() in DOCUMENTS
    plain = data.format == "text" or document
    if plain or not (data.chat_template and tokenizer.has_template):
        return np.array(tokenizer.prefix + tokenizer.encode(prompt), np.int32)
    message = {"role": "user", "content": prompt}
    return np.array(tokenizer.render([message], generation_prompt=True), np.int32)


def _is_pair(row: Row, tokenizer: Tokenizer, data: Data) -> bool:
    return row.pair is not None and not (data.chat_template and tokenizer.has_template)


def _mark_rows(rows: Sequence[Row], tokenizer: Tokenizer, data: Data) -> list[Marked]:
    """Texts, joined pairs and conversations, each kind tokenized together, in the rows' order."""
    texts = [i for i, row in enumerate(rows) if row.messages is None]
    pairs = [i for i, row in enumerate(rows) if _is_pair(row, tokenizer, data)]
    plain = {*texts, *pairs}
    chats = [i for i in range(len(rows)) if i not in plain]
    layouts = every(lambda i: lay_out(rows[i], tokenizer, data.train_on), chats)
    found = dict(zip(texts, _mark_texts([rows[i] for i in texts], tokenizer), strict=True))
    found |= zip(pairs, _mark_pairs([rows[i] for i in pairs], tokenizer, data), strict=True)
    found |= zip(chats, mark(layouts, tokenizer), strict=True)
    return [found[i] for i in range(len(rows))]


def _mark_texts(rows: Sequence[Row], tokenizer: Tokenizer) -> list[Marked]:
    """bos where the tokenizer adds one, the text, eos; all trained but the first token."""
    marked = []
    for row, ids in zip(rows, tokenizer.encode_many([r.text or "" for r in rows]), strict=True):
        whole = [*tokenizer.prefix, *ids, tokenizer.eos_id]
        empty = not (row.text or "").strip()
        marked.append(_from(1, whole) if not empty else _from(len(whole), whole))
    return marked


def _mark_pairs(rows: Sequence[Row], tokenizer: Tokenizer, data: Data) -> list[Marked]:
    """Prompt and completion tokenized apart, so that the edge is exact, then eos."""
    pairs = [row.pair or ("", "") for row in rows]
    prompts = tokenizer.encode_many([prompt for prompt, _ in pairs])
    completions = tokenizer.encode_many([completion for _, completion in pairs])
    marked = []
    for pair, prompt, completion in zip(pairs, prompts, completions, strict=True):
        ids = [*tokenizer.prefix, *prompt, *completion, tokenizer.eos_id]
        start = 1 if data.train_on == "all" else len(tokenizer.prefix) + len(prompt)
        marked.append(_from(start if pair[1].strip() else len(ids), ids))
    return marked


def _from(start: int, ids: list[int]) -> Marked:
    scored = np.arange(len(ids)) >= max(start, 1)
    return Marked(ids=ids, scored=scored)


def _notices(
    rows: Sequence[Row], marked: Sequence[Marked], tokenizer: Tokenizer, data: Data
) -> list[str]:
    """What was done otherwise than the recipe or the rows may lead one to expect."""
    joined = [row for row in rows if row.pair and data.chat_template and not tokenizer.has_template]
    crossed = [row for row, one in zip(rows, marked, strict=True) if not one.exact]
    called = [row for row in rows if row.messages and with_objects(row.messages) != [*row.messages]]
    tools = [row for row in rows if row.tools and "tools" not in tokenizer.template(row.tools)]
    causes = (
        (joined, "the model has no chat template: prompt and completion are joined as they are"),
        (crossed, "a token lies across the edge of a turn; it is left untrained"),
        (called, "tool-call arguments given as JSON text were read as objects"),
        (tools, "the model's chat template leaves `tools` out"),
    )
    return [f"{_count(found)}: {text}" for found, text in causes if found]


def _count(rows: Sequence[Row]) -> str:
    return f"{len(rows)} row{'s' * (len(rows) > 1)} ({rows[0].where}{' ...' * (len(rows) > 1)})"
