"""The prompts that deployed files are compared on: prose, code, chats, special tokens, scripts.

prompts.jsonl holds them; the first six are of all kinds. In the public domain are the passages of
Austen, Carroll, Dickens, Lincoln, Melville and Shakespeare and the first article of the Universal
Declaration of Human Rights; the rest was written for pippin and has its licence.
"""

import itertools
import json
from pathlib import Path
from typing import Any

from pippin.errors import DataError
from pippin.figures import counted
from pippin.model.tokenizer import Tokenizer

LONGEST = 512


def gate_prompts(
    tokenizer: Tokenizer, context: int, count: int
) -> tuple[list[list[int]], list[str]]:
    """The first `count` prompts as token ids, and what could not be among them.

    Texts are cut to what the context holds, chats that do not fit are left out.
    """
    lines = Path(__file__).with_name("prompts.jsonl").read_text("utf-8").splitlines()[:count]
    rows, longest = [json.loads(line) for line in lines], min(LONGEST, context - 1)
    prompts = [ids for row in rows if (ids := _encode(row, tokenizer, longest))]
    if not (left := len(rows) - len(prompts)):
        return prompts, []
    why = "the template refuses them, or they do not fit"
    why = why if tokenizer.has_template else "the model has no chat template"
    return prompts, [f"{counted(left, 'chat')} left out of the check's prompts: {why}"]


def _encode(row: dict[str, Any], tokenizer: Tokenizer, longest: int) -> list[int]:
    if "text" in row:
        return tokenizer.encode(_filled(row["text"], tokenizer))[:longest]
    if not tokenizer.has_template:
        return []
    try:
        ids = tokenizer.render(row["messages"], generation_prompt=True)
    except DataError:  # some templates refuse a system message
        return []
    return ids if len(ids) <= longest else []


def _filled(text: str, tokenizer: Tokenizer) -> str:
    """The text with special tokens, each in turn, where it has places for them."""
    specials = itertools.cycle(tokenizer.special_texts or ("",))
    first, *others = text.split("{special}")
    return first + "".join(next(specials) + other for other in others)
