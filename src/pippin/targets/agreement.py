"""A deployed file against the quantized model it was made from: the same numbers, the same tokens.

Shape letters: B batch (1), T tokens, K kept tokens of a distribution.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pippin.engines import Sampling, Scorer, load_engine
from pippin.errors import PippinError
from pippin.targets.native_log import without_harmless_lines

GREEDY_TOKENS = 8
_KEPT = 64
_TINY = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """Means over all tokens of all prompts.

    KL in nats a token, over the parent's likeliest tokens and the rest; `max_difference` is that of
    their log-probabilities. `greedy_equal` counts the file's greedy tokens up to the first that the
    parent would not have chosen.
    """

    prompts: int
    tokens: int
    mean_kl: float
    top1: float
    max_difference: float
    greedy_equal: int
    greedy_tokens: int


def load_parent(quantized: Path) -> Scorer:
    """The quantized model in PyTorch, in float32."""
    with without_harmless_lines():
        return load_engine("torch", "cpu").load(quantized, "float32")


def compare(
    found: Scorer,
    parent: Scorer,
    prompts: Sequence[Sequence[int]],
    context: int,
    greedy: int = GREEDY_TOKENS,
) -> Agreement:
    """Score every prompt and its greedy answer, `context` tokens at most, in both."""
    answers = [min(greedy, context - len(prompt)) for prompt in prompts]
    rows = [_row(found, parent, list(p), n) for p, n in zip(prompts, answers, strict=True)]
    kl_T = np.concatenate([row[0] for row in rows])
    return Agreement(
        prompts=len(rows),
        tokens=len(kl_T),
        mean_kl=float(kl_T.mean()),
        top1=float(np.concatenate([row[1] for row in rows]).mean()),
        max_difference=max(row[2] for row in rows),
        greedy_equal=sum(row[3] for row in rows),
        greedy_tokens=sum(row[4] for row in rows),
    )


def require(target: str, agreement: Agreement, max_kl: float, min_top1: float) -> dict[str, Any]:
    """The figures for deploy.json. Raises PippinError, with them, where they miss a limit."""
    figures = asdict(agreement)
    # Written so that a figure that is not a number fails.
    if not (agreement.mean_kl <= max_kl and agreement.top1 >= min_top1):
        measured = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        raise PippinError(
            f"{target}: the file does not compute what the quantized model does: {measured}",
            f"mean_kl may be {max_kl:g}, top1 no less than {min_top1:g}; use the versions of the "
            "packages that pippin names",
        )
    return figures


def _row(found: Scorer, parent: Scorer, prompt: list[int], greedy: int) -> tuple[Any, ...]:
    steps = found.generate([np.array(prompt, np.int32)], Sampling(max_tokens=greedy))
    answer = [int(step[0]) for step in steps if step[0] is not None]
    row_BT = np.array([prompt + answer], np.int32)
    wanted = parent.topk(row_BT, _KEPT)
    given = found.topk(row_BT, 1, wanted.ids_BTK)
    p_TK, q_TK = wanted.logprobs_BTK[0], given.logprobs_BTK[0, :, 1:]
    equal_T = wanted.ids_BTK[0, :, 0] == given.ids_BTK[0, :, 0]
    chosen = wanted.ids_BTK[0, len(prompt) - 1 : -1, 0]
    differ = (i for i, token in enumerate(answer) if token != chosen[i])
    difference = float(np.abs(p_TK - q_TK).max())
    return _kl(p_TK, q_TK), equal_T, difference, next(differ, len(answer)), len(answer)


def _kl(p_TK: NDArray[np.float32], q_TK: NDArray[np.float32]) -> NDArray[np.float64]:
    """Per token, over the kept tokens and one for all the rest."""
    p_TK, q_TK = p_TK.astype(np.float64), q_TK.astype(np.float64)
    kept_T = (np.exp(p_TK) * (p_TK - q_TK)).sum(-1)
    p_T, q_T = (np.clip(1 - np.exp(x).sum(-1), _TINY, 1) for x in (p_TK, q_TK))
    return kept_T + p_T * np.log(p_T / q_T)
