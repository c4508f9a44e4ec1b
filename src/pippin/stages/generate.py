"""Speaks with whatever is given: the furthest stage of a run, a model, an adapter, a bundle.

Shape letters: T tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pippin import artifact
from pippin.data.chat import render_prompt
from pippin.engines import CacheQuantizer, Sampling, Scorer, Tokens
from pippin.errors import DataError, ModelError, UsageError
from pippin.events import Notice
from pippin.figures import counted
from pippin.model.adapter import load_adapter
from pippin.model.source import locate_adapter, locate_adapter_base
from pippin.model.tokenizer import Tokenizer, load_tokenizer
from pippin.recipe import Data, Model, Recipe
from pippin.stages.belonging import check_base
from pippin.stages.loading import context_of, load_scorer, runtime_of
from pippin.stages.newest import Found, find
from pippin.stages.speech import Answer, Message, fit_messages

STAGE = "generate"
RENDERING = frozenset({"data.chat_template", "data.format"})
Notify = Callable[[Notice], None]


@dataclass(kw_only=True, slots=True)
class Speaker:
    """A loaded model that answers. `context` is how many tokens it holds, where that is known.

    A conversation that does not fit loses its oldest exchanges, which is said; without `trims` it
    is refused.
    """

    title: str
    scorer: Scorer
    tokenizer: Tokenizer
    data: Data
    context: int | None
    notify: Notify
    trims: bool = True

    def quantize_cache(self, bits: int) -> None:
        """Keep keys and values in so many bits from now on.

        Raises UsageError where what speaks does not have it.
        """
        if not isinstance(self.scorer, CacheQuantizer):
            raise UsageError(
                f"{self.title} keeps its keys and values whole: only engine mlx has fewer bits",
                "leave --cache-bits out, or give a recipe with model.engine = mlx",
            )
        self.scorer.quantize_cache(bits)

    def say(self, said: str | Sequence[Message], sampling: Sampling) -> Answer:
        """The answer to a prompt or to a conversation, which comes while it is iterated over.

        The tokenizer's stop tokens end it, beside those of `sampling`. Raises DataError for what
        does not fit, ModelError for a conversation with a model that has no chat template.
        """
        prompt_T = self._prompt(said) if isinstance(said, str) else self._chat(said, sampling)
        sampling = self._fitted(len(prompt_T), sampling)
        return Answer(
            source=self._tokens(prompt_T, sampling),
            tokenizer=self.tokenizer,
            prompt_tokens=len(prompt_T),
            limit=sampling.max_tokens,
        )

    def _tokens(self, prompt_T: Tokens, sampling: Sampling) -> Iterator[int]:
        for (token,) in self.scorer.generate([prompt_T], sampling):
            if token is None:
                return
            yield token

    def _prompt(self, text: str) -> Tokens:
        return render_prompt(text, self.tokenizer, self.data)

    def _chat(self, messages: Sequence[Message], sampling: Sampling) -> Tokens:
        if not self.tokenizer.has_template:
            raise ModelError(
                f"{self.title} has no chat template",
                "use `pippin generate` with a prompt, or tune an instruct model",
            )
        if self.context is not None and self.trims:
            # A long answer must not leave a short context without room for any question.
            room = self.context - min(sampling.max_tokens, self.context // 2)
            messages = self._trimmed(messages, room)
        return np.array(self._render(messages), np.int32)

    def _render(self, messages: Sequence[Message]) -> list[int]:
        return self.tokenizer.render(list(messages), generation_prompt=True)

    def _trimmed(self, messages: Sequence[Message], room: int) -> list[Message]:
        kept = fit_messages(messages, lambda some: len(self._render(some)), room)
        if dropped := len(messages) - len(kept):
            oldest = counted(dropped, "oldest message")
            text = f"left out, beyond {self.context} tokens: the {oldest}"
            self.notify(Notice(stage=STAGE, text=text))
        return kept

    def _fitted(self, prompt: int, sampling: Sampling) -> Sampling:
        """The sampling with our stop tokens, and no more tokens than there is room for."""
        if prompt < 1:
            raise DataError(
                f"the prompt has no tokens, and {self.title} has none to begin a text with",
                "write something",
            )
        room = sampling.max_tokens if self.context is None else self.context - prompt
        if room < 1:
            raise DataError(
                f"the prompt is {counted(prompt, 'token')} long, {self.title} holds {self.context}",
                "shorten the prompt",
            )
        if room < sampling.max_tokens:
            end = counted(room, "token")
            text = f"the answer ends after {end}: {self.title} holds {self.context} in all"
            self.notify(Notice(stage=STAGE, text=text))
        return replace(
            sampling,
            max_tokens=min(room, sampling.max_tokens),
            stop=sampling.stop | self.tokenizer.stop_ids,
        )


@dataclass(kw_only=True, slots=True)
class Conversation:
    """Remembers what was said; `messages` may begin with a system message."""

    speaker: Speaker
    sampling: Sampling
    messages: list[Message]

    def ask(self, text: str) -> Iterator[str]:
        """The answer piece by piece; what was heard of it is remembered, all of it or a part.

        A question that cannot be asked is forgotten again.
        """
        self.messages.append({"role": "user", "content": text})
        answer: list[str] = []
        try:
            for piece in self.speaker.say(self.messages, self.sampling):
                answer.append(piece)
                yield piece
        finally:
            if answer:
                self.messages.append({"role": "assistant", "content": "".join(answer)})
            else:
                self.messages.pop()


def load_speaker(
    folder: Path, notify: Notify, recipe: Recipe | None = None, base: Path | None = None
) -> Speaker:
    """The model in `folder`: a run's, whose furthest stage speaks, or any folder that `find` knows.

    `recipe` gives engine, device, dtype and how prompts are rendered, without one as in training;
    `base` is the model under an adapter, or of a run that has only begun. What speaks is said
    through `notify`. Raises
    ModelError where nothing speaks, or an adapter was trained on another base.
    """
    adapter = locate_adapter(recipe.model, recipe.folder) if recipe else None
    found = find(folder, base, adapter, recipe)
    if "adapter" in found.inputs:
        model_digest = artifact.digest(found.inputs["model"])
        loaded = load_adapter(found.inputs["adapter"])
        trained_on = locate_adapter_base(recipe.model, recipe.folder) if recipe else None
        for text in check_base(loaded, found.inputs["model"], model_digest, trained_on):
            notify(Notice(stage=STAGE, text=text))
    runtime = runtime_of(found.inputs)
    how = "" if runtime is None else f", run as {runtime}"
    notify(Notice(stage=STAGE, text=f"speaking: {found.title}{how}"))
    model = recipe.model if recipe else Model(source=str(folder))
    return Speaker(
        title=found.title,
        scorer=load_scorer(found.inputs, model, model.dtype),
        tokenizer=load_tokenizer(found.folder),
        data=recipe.data if recipe else _rendering(found),
        context=context_of(found.inputs),
        notify=notify,
    )


def _rendering(found: Found) -> Data:
    """How prompts were rendered in training, as a manifest tells; as chats where none does."""
    own = found.inputs.get("adapter", found.folder)
    for folder in (own, own.parent / "train"):
        settings = (artifact.read_manifest(folder) or {}).get("settings", {})
        if RENDERING.issubset(settings):
            values = {key.removeprefix("data."): settings[key] for key in RENDERING}
            return Data(source="", **values)
    return Data(source="")
