"""Greedy answers to many prompts, and their comparison with a reference."""

from collections.abc import Iterator, Sequence
from typing import Any

from pippin.data.chat import Example
from pippin.engines import Sampling, Scorer, Tokens
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


def compare(example: Example, prompt: str, answer: str) -> dict[str, Any]:
    """A sample of scores.json. Equal means equal text, white space around both left out of it."""
    return {
        "where": example.where,
        "prompt": prompt,
        "answer": answer,
        "reference": example.answer,
        "equal": answer.strip() == example.answer.strip(),
    }


def exact_match(samples: Sequence[dict[str, Any]]) -> float | None:
    """Share of equal samples; None where there are none."""
    return sum(sample["equal"] for sample in samples) / len(samples) if samples else None
