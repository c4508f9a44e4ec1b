"""A deployed file against the quantized model it was made from: the same numbers, the same tokens.

Shape letters: B batch (1), T tokens, K kept tokens of a distribution.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pippin.engines import Sampling, Scorer, Tokens, TopK, load_engine
from pippin.errors import PippinError
from pippin.targets.native_log import without_harmless_lines
from pippin.targets.stepping import SteppingModel

_KEPT, _LAST = 64, 8
_TINY = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """What a prompt is worth: so many greedy tokens, and more where the file's runtime affords it.

    The first `stepped` prompts, all for None, the file answers token by token as well; of the
    others one pass tells which tokens it would have chosen. Every token of a prompt that is judged
    `whole` counts, else the last eight and those of the answer: some runtimes that only show here
    what a file holds give the last logits of a call alone, and a token a call would take long.
    """

    greedy: int = 8
    stepped: int | None = None
    whole: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """Means over all judged tokens of all prompts.

    KL in nats a token, over the parent's likeliest tokens and the rest; `max_difference` is that of
    their log-probabilities. `greedy_equal` counts the parent's greedy tokens up to the first that
    the file would not have chosen. Speeds are tokens a second, the parent's those of PyTorch in
    float32 on the same prompts; None where nothing was decoded.
    """

    prompts: int
    tokens: int
    mean_kl: float
    top1: float
    max_difference: float
    greedy_equal: int
    greedy_tokens: int
    prefill_speed: float | None
    decode_speed: float | None
    parent_prefill_speed: float | None
    parent_decode_speed: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """Greedy tokens, and the seconds until the first and from then on."""

    prompt: int
    ids: list[int]
    first: float
    rest: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answers:
    """To one prompt; `own` is the file's where it was decoded token by token."""

    parent: _Answer
    own: _Answer | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """One prompt."""

    kl_T: NDArray[np.float64]
    equal_T: NDArray[np.bool_]
    difference: float
    greedy_equal: int
    answers: _Answers


def load_parent(quantized: Path) -> Scorer:
    """The quantized model in PyTorch, in float32."""
    with without_harmless_lines():
        return load_engine("torch", "cpu").load(quantized, "float32")


def compare(
    found: Scorer,
    parent: Scorer,
    prompts: Iterable[Sequence[int]],
    context: int,
    effort: Effort = Effort(),
) -> Agreement:
    """Score every prompt and the parent's greedy answer, `context` tokens at most, in both."""
    rows = []
    for i, prompt in enumerate(prompts):
        room = min(effort.greedy, context - len(prompt))
        steps = effort.stepped is None or i < effort.stepped
        first = 0 if effort.whole else max(0, len(prompt) - _LAST)
        answer = _answer(parent, list(prompt), room)
        own = _answer(found, list(prompt), room) if steps else None
        rows.append(_row(found, parent, list(prompt), _Answers(parent=answer, own=own), first))
    kl_T = np.concatenate([row.kl_T for row in rows])
    own = [row.answers.own for row in rows if row.answers.own]
    theirs = [row.answers.parent for row in rows]
    return Agreement(
        prompts=len(rows),
        tokens=len(kl_T),
        mean_kl=float(kl_T.mean()),
        top1=float(np.concatenate([row.equal_T for row in rows]).mean()),
        max_difference=max(row.difference for row in rows),
        greedy_equal=sum(row.greedy_equal for row in rows),
        greedy_tokens=sum(len(answer.ids) for answer in theirs),
        prefill_speed=_prefill_speed(own),
        decode_speed=_decode_speed(own),
        parent_prefill_speed=_prefill_speed(theirs),
        parent_decode_speed=_decode_speed(theirs),
    )


def require(target: str, agreement: Agreement, max_kl: float, min_top1: float) -> dict[str, Any]:
    """The figures for deploy.json. Raises PippinError, with them, where they miss a limit.

    One likeliest token may always be another: of few tokens it would decide.
    """
    figures = asdict(agreement)
    may_differ = max(1, (1 - min_top1) * agreement.tokens) + _TINY
    # Written so that a figure that is not a number fails.
    if not (agreement.mean_kl <= max_kl and (1 - agreement.top1) * agreement.tokens <= may_differ):
        known = {name: value for name, value in figures.items() if value is not None}
        measured = ", ".join(f"{name} {value:.4g}" for name, value in known.items())
        raise PippinError(
            f"{target}: the file does not compute what the quantized model does: {measured}",
            f"mean_kl may be {max_kl:g}, top1 no less than {min_top1:g}; use the versions of the "
            "packages that pippin names",
        )
    return figures


def _row(found: Scorer, parent: Scorer, prompt: list[int], answers: _Answers, first: int) -> _Row:
    """Prompt and answer through both, judged from token `first` on."""
    answer = answers.parent.ids
    row_BT = np.array([prompt + answer], np.int32)
    wanted = parent.topk(row_BT, _KEPT)
    ids_TK, p_TK = wanted.ids_BTK[0, first:], wanted.logprobs_BTK[0, first:]
    given = _topk_from(found, row_BT, ids_TK[None], first)
    q_TK, ids_T = given.logprobs_BTK[0, :, 1:], given.ids_BTK[0, :, 0]
    chosen = answers.own.ids if answers.own else ids_T[len(prompt) - 1 - first :].tolist()
    differ = (i for i, token in enumerate(answer) if token != chosen[i])
    return _Row(
        kl_T=_kl(p_TK, q_TK),
        equal_T=ids_TK[:, 0] == ids_T,
        difference=float(np.abs(p_TK - q_TK).max()),
        greedy_equal=next(differ, len(answer)),
        answers=answers,
    )


def _topk_from(found: Scorer, row_BT: Tokens, ids_BTK: NDArray[np.int32], first: int) -> TopK:
    if first == 0:
        return found.topk(row_BT, 1, ids_BTK)
    assert isinstance(found, SteppingModel), "others give every token's logits at once"
    return found.topk(row_BT, 1, ids_BTK, first)


def _answer(scorer: Scorer, prompt: list[int], count: int) -> _Answer:
    started = time.perf_counter()
    ids, times = [], [started]
    for (token,) in scorer.generate([np.array(prompt, np.int32)], Sampling(max_tokens=count)):
        if token is not None:
            ids.append(int(token))
            times.append(time.perf_counter())
    first = times[1] if ids else started
    return _Answer(prompt=len(prompt), ids=ids, first=first - started, rest=times[-1] - first)


def _prefill_speed(answers: Sequence[_Answer]) -> float | None:
    seconds = sum(answer.first for answer in answers)
    return sum(answer.prompt for answer in answers) / seconds if seconds else None


def _decode_speed(answers: Sequence[_Answer]) -> float | None:
    seconds = sum(answer.rest for answer in answers)
    tokens = sum(max(0, len(answer.ids) - 1) for answer in answers)
    return tokens / seconds if seconds and tokens else None


def _kl(p_TK: NDArray[np.float32], q_TK: NDArray[np.float32]) -> NDArray[np.float64]:
    """Per token, over the kept tokens and one for all the rest."""
    p_TK, q_TK = p_TK.astype(np.float64), q_TK.astype(np.float64)
    kept_T = (np.exp(p_TK) * (p_TK - q_TK)).sum(-1)
    p_T, q_T = (np.clip(1 - np.exp(x).sum(-1), _TINY, 1) for x in (p_TK, q_TK))
    return kept_T + p_T * np.log(p_T / q_T)
