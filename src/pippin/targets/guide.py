"""The README of a bundle: one frame for all targets, filled from what deploy.json says."""

from dataclasses import dataclass
from typing import Any

from pippin.figures import check_text

_COMMON_FILES = {
    "tokenizer.json": "the tokenizer",
    "chat_template.jinja": "how a conversation becomes text, where the model has one",
    "generation_config.json": "the model's own defaults for sampling",
    "deploy.json": "stop ids, context, digests of all files, versions, the figures of the check",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Guide:
    """What one target says: a title, what it is and how it was checked, and how to run it.

    Texts are Markdown; `run` holds whole sections.
    """

    title: str
    about: str
    run: str


def render(guide: Guide, description: dict[str, Any]) -> str:
    """The README as Markdown."""
    megabytes = description["size_bytes"] / 1e6
    files = {**description["files"], **_COMMON_FILES}
    table = "\n".join(f"| {name} | {text} |" for name, text in files.items())
    return f"""\
# {guide.title}

{guide.about}

It holds {description["context"]} tokens, prompt and answer together, and takes {megabytes:.0f} MB.
{_checked(description)}

| file | what it is |
|---|---|
{table}

{guide.run.strip()}

## What every runner must do

- Use the tokenizer in this folder; `deploy.json` has its digest. Another model's tokenizer gives
  other tokens, and the answers become noise.
- Render a conversation with the chat template, with its generation prompt at the end.
- Stop at any of the token ids {description["stop_ids"]}.
"""


def _checked(description: dict[str, Any]) -> str:
    text = check_text(description["check"])
    return f"On the machine that made it: {text}." if text else ""
