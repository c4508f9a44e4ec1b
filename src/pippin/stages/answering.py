"""Greedy answers to many prompts, and their comparison with a reference.

Shape letters: T tokens.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from pippin.engines import Sampling, Scorer, Tokens
from pippin.stages.exam import Asked
from pippin.stages.scoring import groups


def answer_all(
    scorer: Scorer, prompts: Sequence[Tokens], sampling: Sampling, rows: int
) -> Iterator[dict[int, list[int]]]:
    """The answers' token ids by index of the prompt, `rows` prompts of similar length at a time."""
    for group in groups([len(prompt_T) for prompt_T in prompts], rows):
        answers: list[list[int]] = [[] for _ in group]
        for step in scorer.generate([prompts[index] for index in group], sampling):
            for answer, token in zip(answers, step, strict=True):
                if token is not None:
                    answer.append(token)
        yield dict(zip(group, answers, strict=True))


def compare(asked: Asked, answer: str) -> dict[str, Any]:
    """A sample of scores.json. Equal is equal text, white space at both ends left out of it."""
    return {
        "where": asked.where,
        "prompt": asked.text,
        "answer": answer,
        "reference": asked.reference,
        "equal": answer.strip() == asked.reference.strip(),
    }


def exact_match(samples: Sequence[dict[str, Any]]) -> float | None:
    """Share of equal samples; None where there are none."""
    return sum(sample["equal"] for sample in samples) / len(samples) if samples else None
