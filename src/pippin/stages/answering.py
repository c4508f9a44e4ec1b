"""Greedy answers to many prompts, and their comparison with a reference.

Shape letters: T tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

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


def confirm_all(
    scorer: Scorer, asked: Sequence[Asked], sampling: Sampling
) -> Iterator[dict[int, list[int]]]:
    """The same greedy answers where a call costs much and its length little, one by one.

    A draft is scored in one call: as long as every token of it is the scorer's own choice, it is
    what the scorer would have answered. From the first other token on it answers by itself.
    """
    for index, one in enumerate(asked):
        draft = list(one.draft or ())[: sampling.max_tokens]
        row = [*one.prompt_T.tolist(), *draft]
        found = scorer.topk(np.array([row], np.int32), 1).ids_BTK[0, len(one.prompt_T) - 1 :, 0]
        equal = next((i for i, token in enumerate(draft) if token != found[i]), len(draft))
        said = draft[:equal]
        yield {index: [*said, *_rest(scorer, one, said, int(found[equal]), sampling)]}


def _rest(
    scorer: Scorer, asked: Asked, said: list[int], token: int, sampling: Sampling
) -> list[int]:
    """The answer from `token` on, which follows what was said."""
    room = sampling.max_tokens - len(said)
    if room <= 0 or token in sampling.stop:
        return []
    row_T = np.array([*asked.prompt_T.tolist(), *said, token], np.int32)
    steps = scorer.generate([row_T], replace(sampling, max_tokens=room - 1))
    return [token, *(step[0] for step in steps if step[0] is not None)]


def compare(asked: Asked, answer: str, ids: Sequence[int]) -> dict[str, Any]:
    """A sample of scores.json. Equal is equal text, white space at both ends left out of it."""
    return {
        "where": asked.where,
        "prompt": asked.text,
        "answer": answer,
        "ids": list(ids),
        "reference": asked.reference,
        "equal": answer.strip() == asked.reference.strip(),
    }


def exact_match(samples: Sequence[dict[str, Any]]) -> float | None:
    """Share of equal samples; None where there are none."""
    return sum(sample["equal"] for sample in samples) / len(samples) if samples else None
