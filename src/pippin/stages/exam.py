"""What every stage is asked: held-out rows to score, questions to answer, fixed prompts.

Shape letters: T tokens.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from pippin.data.batches import Sample
from pippin.data.chat import Example, examples, render_prompt, tokenize
from pippin.data.dataset import Row, find_splits, load_split
from pippin.engines import Tokens
from pippin.errors import DataError
from pippin.figures import counted
from pippin.model.tokenizer import Tokenizer
from pippin.recipe import Recipe

# A deployed file reads a token at a time here: this many keep its evaluation to minutes.
DEPLOYED_TOKENS = 4000


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A prompt as `prompt_T` token ids and as `text` without a template around it.

    `reference` is the answer of the held-out row at `where`; a recipe's prompt has neither.
    `draft` is what the parent answered, where a slow runtime is asked to confirm it.
    """

    prompt_T: Tokens
    text: str
    reference: str = ""
    where: str = ""
    draft: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Exam:
    """Samples are scored, questions and prompts are answered; `notices` say what was left out.

    `is_cut` where so few are left that only the parent on the same rows is a fair measure.
    """

    samples: list[Sample]
    questions: list[Asked]
    prompts: list[Asked]
    notices: list[str]
    is_cut: bool = False

    @property
    def total(self) -> int:
        """Rows of work: each is scored, or answered."""
        return len(self.samples) + len(self.questions) + len(self.prompts)


def read_exam(recipe: Recipe, tokenizer: Tokenizer) -> Exam:
    """The exam of a recipe, equal for every stage. Raises DataError where no row can be scored."""
    limits = recipe.evaluate
    rows = load_split(recipe.data, recipe.folder, "test")
    scored = tokenize(rows[: limits.rows], tokenizer, recipe.data)
    if not scored.samples:
        raise DataError(
            f"the test split of {recipe.data.source} has no row that can be scored",
            "give `data.test` rows with an answer, or raise data.max_seq_len",
        )
    asked = examples(rows[: limits.generate_rows], tokenizer, recipe.data)
    prompts = [
        Asked(prompt_T=render_prompt(text, tokenizer, recipe.data), text=text)
        for text in limits.prompts
    ]
    if empty := sum(not len(one.prompt_T) for one in (*asked, *prompts)):
        raise DataError(
            f"{counted(empty, 'prompt')} to be answered without a token to begin with",
            "leave empty ones out of data and evaluate.prompts, or set evaluate.generate_rows = 0",
        )
    return Exam(
        samples=scored.samples[: limits.rows],  # a document is one row and many samples
        questions=_questions(rows, asked),
        prompts=prompts,
        notices=[
            *_set_aside(recipe),
            *_not_scored(len(rows), len(scored.samples), limits.rows),
            *scored.notices,
            *_out_of_reach(asked, tokenizer, limits.max_tokens),
        ],
    )


def _set_aside(recipe: Recipe) -> list[str]:
    place = find_splits(recipe.data, recipe.folder)["test"]
    return [] if isinstance(place, Path) else [f"no test file: held-out rows are {place}"]


def _not_scored(rows: int, samples: int, limit: int) -> list[str]:
    """A document is one row and many samples, which the limit counts."""
    found, name = (rows, "test row") if rows > limit else (samples, "block")
    if found <= limit:
        return []
    return [f"scored: the first {limit:,} of {counted(found, name)}, as evaluate.rows says"]


def _questions(rows: list[Row], asked: list[Example]) -> list[Asked]:
    said = {row.where: _last_question(row) for row in rows}
    return [
        Asked(
            prompt_T=example.prompt_T,
            text=said.get(example.where, ""),
            reference=example.answer,
            where=example.where,
        )
        for example in asked
    ]


def _last_question(row: Row) -> str:
    """What was said right before the last answer."""
    messages = row.messages or ()
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i]
    return str(messages[answers[-1] - 1].get("content", "")) if answers else ""


def _out_of_reach(asked: list[Example], tokenizer: Tokenizer, max_tokens: int) -> list[str]:
    long = sum(len(tokenizer.encode(example.answer)) > max_tokens for example in asked)
    if not long:
        return []
    return [
        f"counted as wrong, being longer than evaluate.max_tokens = {max_tokens}: {long} of "
        f"{counted(len(asked), 'reference')}"
    ]


def shorten(exam: Exam, recipe: Recipe) -> Exam:
    """The part of an exam that a deployed file is given.

    Rows in order until DEPLOYED_TOKENS are read; what fits in its context together with an answer.
    """
    context, limits = recipe.deploy.context, recipe.evaluate
    samples = _affordable(exam.samples, context, DEPLOYED_TOKENS)
    questions = _fitting(exam.questions, context - limits.max_tokens)
    prompts = _fitting(exam.prompts, context - limits.prompt_tokens)
    notices = list(exam.notices)
    if len(samples) < len(exam.samples):
        notices.append(
            f"the deployed file scores {len(samples)} of "
            f"{counted(len(exam.samples), 'held-out row')}, and is compared with its parent "
            "on these"
        )
    if left := len(exam.questions) + len(exam.prompts) - len(questions) - len(prompts):
        asked = counted(left, "question")
        notices.append(f"deploy.context = {context} is too short for {asked}: not asked")
    return Exam(samples=samples, questions=questions, prompts=prompts, notices=notices)


def within(exam: Exam, recipe: Recipe, context: int | None) -> Exam:
    """The exam without questions and prompts that a model of `context` tokens cannot be asked.

    A question longer than `data.max_seq_len` is left out as its row is. Raises DataError where a
    row to score is longer than the context.
    """
    refuse_beyond(exam.samples, context)
    limit = recipe.data.max_seq_len
    room = limit if context is None else min(limit, context - 1)
    questions = _fitting(exam.questions, room)
    prompts = exam.prompts if context is None else _fitting(exam.prompts, context - 1)
    notices = list(exam.notices)
    if left := len(exam.questions) - len(questions):
        notices.append(f"not asked: {counted(left, 'held-out question')} beyond {room} tokens")
    if left := len(exam.prompts) - len(prompts):
        notices.append(f"not asked: {counted(left, 'prompt')} beyond the model's {context} tokens")
    return replace(exam, questions=questions, prompts=prompts, notices=notices)


def refuse_beyond(samples: list[Sample], context: int | None) -> None:
    """Raise DataError where samples are longer than a model's positions."""
    longest = max((len(sample.tokens) for sample in samples), default=0)
    if context is not None and longest > context:
        count = sum(len(sample.tokens) > context for sample in samples)
        raise DataError(
            f"longer than the model's {context} positions: {count} of "
            f"{counted(len(samples), 'sample')}; "
            f"the longest has {longest} tokens",
            f'set data.max_seq_len = {context}, and data.too_long = "cut" or "drop"',
        )


def _affordable(samples: list[Sample], context: int, budget: int) -> list[Sample]:
    taken, used = [], 0
    for sample in samples:
        length = len(sample.tokens)
        if length <= context and (used + length <= budget or not taken):
            taken.append(sample)
            used += length
    if not taken:
        raise DataError(
            f"none of {len(samples)} held-out rows fits a context of {context} tokens",
            "raise deploy.context",
        )
    return taken


def _fitting(asked: list[Asked], room: int) -> list[Asked]:
    return [one for one in asked if len(one.prompt_T) <= room]
