"""What every stage is asked: held-out rows to score, questions to answer, fixed prompts.

Shape letters: T tokens.
"""

from dataclasses import dataclass, replace

from pippin.data.batches import Sample
from pippin.data.chat import Example, examples, render_prompt, tokenize
from pippin.data.dataset import Row, find_splits, load_split
from pippin.engines import Tokens
from pippin.errors import DataError
from pippin.model.tokenizer import Tokenizer
from pippin.recipe import Recipe

# A deployed file reads a token at a time here: this many keep its evaluation to minutes.
DEPLOYED_TOKENS = 4000


@dataclass(frozen=True, kw_only=True, slots=True)
class Exam:
    """`questions` are the examples' prompts as text; `notices` say what was left out, and why."""

    split: str
    samples: list[Sample]
    examples: list[Example]
    questions: list[str]
    prompts: list[Tokens]
    notices: list[str]

    @property
    def total(self) -> int:
        """Rows of work: each is scored, or answered."""
        return len(self.samples) + len(self.examples) + len(self.prompts)


def read_exam(recipe: Recipe, tokenizer: Tokenizer) -> Exam:
    """The exam of a recipe, equal for every stage. Raises DataError where no row can be scored."""
    split, rows = _held_out(recipe)
    scored = tokenize(rows[: recipe.evaluate.rows], tokenizer, recipe.data)
    if not scored.samples:
        raise DataError(
            f"the {split} split of {recipe.data.source} has no row that can be scored",
            "give `data.test` rows with an answer, or raise data.max_seq_len",
        )
    asked = examples(rows[: recipe.evaluate.generate_rows], tokenizer, recipe.data)
    prompts = [render_prompt(text, tokenizer, recipe.data) for text in recipe.evaluate.prompts]
    notices = [*scored.notices, *_out_of_reach(asked, tokenizer, recipe.evaluate.max_tokens)]
    if split != "test":
        notices.insert(0, f"no test split: measured on the {split} split")
    return Exam(
        split=split,
        samples=scored.samples,
        examples=asked,
        questions=_questions(rows, asked),
        prompts=prompts,
        notices=notices,
    )


def _questions(rows: list[Row], asked: list[Example]) -> list[str]:
    """What was said to the model before the reference, without the template around it."""
    said = {row.where: row.messages[-2]["content"] for row in rows if len(row.messages or ()) > 1}
    return [said.get(example.where, "") for example in asked]


def _held_out(recipe: Recipe) -> tuple[str, list[Row]]:
    splits = find_splits(recipe.data, recipe.folder)
    for split in ("test", "valid"):
        if splits.get(split) is not None:
            return split, load_split(recipe.data, recipe.folder, split)
    raise DataError(
        f"{recipe.data.source} has neither a test nor a validation split",
        "give one with `data.test`",
    )


def _out_of_reach(asked: list[Example], tokenizer: Tokenizer, max_tokens: int) -> list[str]:
    long = sum(len(tokenizer.encode(example.answer)) > max_tokens for example in asked)
    if not long:
        return []
    return [
        f"{long} of {len(asked)} references are longer than evaluate.max_tokens = {max_tokens} "
        "tokens and count as wrong"
    ]


def shorten(exam: Exam, context: int, max_tokens: int, budget: int = DEPLOYED_TOKENS) -> Exam:
    """The part of an exam that a deployed file of `context` tokens is given.

    Rows in order until `budget` tokens are read; questions that fit together with their answer.
    """
    samples, used = [], 0
    for sample in exam.samples:
        length = len(sample.tokens)
        if length <= context and (used + length <= budget or not samples):
            samples.append(sample)
            used += length
    if not samples:
        raise DataError(
            f"none of {len(exam.samples)} held-out rows fits a context of {context} tokens",
            "raise deploy.context",
        )
    pairs = zip(exam.examples, exam.questions, strict=True)
    fitting = [pair for pair in pairs if len(pair[0].prompt_T) + max_tokens <= context]
    asked = [example for example, _ in fitting]
    return replace(
        exam,
        samples=samples,
        examples=asked,
        questions=[question for _, question in fitting],
        notices=[*exam.notices, *_left(exam, samples, asked)],
    )


def _left(exam: Exam, samples: list[Sample], asked: list[Example]) -> list[str]:
    notices = []
    if len(samples) < len(exam.samples):
        notices.append(
            f"the deployed file scores {len(samples)} of {len(exam.samples)} held-out rows, "
            "and is compared with its parent on these"
        )
    if len(asked) < len(exam.examples):
        notices.append(
            f"{len(exam.examples) - len(asked)} of {len(exam.examples)} questions do not fit "
            "deploy.context with their answer and are not asked"
        )
    return notices
