"""How much of the exam a deployed file is given where its runtime is slow here.

Some runtimes compute on this machine only to show what a file holds: Core AI's expands every weight
at every call on Linux, Core ML's operators run in numpy. Those are timed, and asked what fits.

Shape letters: T tokens.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pippin.engines import Sampling, Scorer
from pippin.figures import counted
from pippin.stages.exam import Asked, Exam

# A row is scored and its question answered, which a draft makes one call as well.
CALLS = 2


def fit(exam: Exam, scorer: Scorer, seconds: float, parent: Mapping[str, Any]) -> Exam:
    """The exam, or as many of its first rows as a runtime that says it is `slow` does in `seconds`.

    `parent` are the scores of what the file was made from: its answers are what the file is asked
    to confirm, token by token in one call, so they come first.
    """
    if not getattr(scorer, "slow", False):
        return exam
    speed = _speed(scorer, exam)
    started = time.perf_counter()
    scorer.topk(exam.samples[0].tokens[None], 1)
    rows = max(1, int(seconds / (CALLS * (time.perf_counter() - started))))
    samples, questions = exam.samples[:rows], _drafted(exam.questions, parent, "samples", "where")
    # A question is compared with the parent's answer; a prompt's answer stands for itself.
    known = [question for question in questions if question.draft is not None]
    notices = [
        f"{len(samples)} of {counted(len(exam.samples), 'row')}, "
        f"{len(known[:rows])} of {counted(len(exam.questions), 'question')}: this runtime "
        f"answers {speed:.2g} tokens/s here"
    ]
    if unknown := len(questions) - len(known):
        notices.append(
            f"not asked: {counted(unknown, 'question')} without an answer in the parent's scores"
        )
    return replace(
        exam,
        samples=samples,
        questions=known[:rows],
        prompts=_drafted(exam.prompts, parent, "answers", "prompt"),
        notices=[*exam.notices, *notices],
        is_cut=True,
    )


def _speed(scorer: Scorer, exam: Exam) -> float:
    """Answers of one token a second, its prompt counted in."""
    asked = [one.prompt_T for one in (*exam.questions, *exam.prompts)]
    prompt_T = min(asked, key=len) if asked else exam.samples[0].tokens[:1]
    started = time.perf_counter()
    tokens = sum(1 for _ in scorer.generate([prompt_T], Sampling(max_tokens=1)))
    return tokens / (time.perf_counter() - started)


def _drafted(asked: list[Asked], parent: Mapping[str, Any], table: str, key: str) -> list[Asked]:
    """All, each with the answer that the parent's scores keep to it."""
    kept = {row[key]: tuple(row.get("ids", ())) for row in parent.get(table, ())}
    named = ((one, one.where if key == "where" else one.text) for one in asked)
    return [replace(one, draft=kept.get(name)) for one, name in named]
