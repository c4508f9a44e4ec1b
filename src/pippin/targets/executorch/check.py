"""Proves a .pte against the same quantized program in eager torch: same numbers, same tokens.

Activations are rounded to int8 in front of every linear, so a difference in a sum's last bit can
move a code by a step, and each step moves others: in a deep model two runs that differ in nothing
but the order of a sum end apart by as much as the rounding itself. How far is measured beside the
file, by nudging the eager program; the file may not differ by more than that.

Shape letters: T tokens, V vocab.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pippin.engines import Sampling
from pippin.errors import PippinError
from pippin.targets.decoder import Decoder, Weights
from pippin.targets.executorch.runtime import PteModel
from pippin.targets.native_log import without_harmless_lines
from pippin.targets.stepping import log_softmax

# Relative size of the nudge: above float32's own rounding, far below a step of int8.
NUDGE, NUDGES = 1e-5, 2
GREEDY_TOKENS = 16
# Allowed over the nudged program: factor and offset of the KL, share of top-1 tokens.
KL_FACTOR, KL_OFFSET, TOP1_SLACK = 2.0, 1e-3, 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Means over all tokens of all prompts; KL in nats a token, differences of logits.

    `nudged_*` compare the eager program with itself after a nudge. `prefill_kl` compares a prompt
    taken at once with the same prompt token by token, both in the file. `greedy_equal` counts the
    file's greedy tokens up to the first that eager torch would not have chosen.
    """

    prompts: int
    tokens: int
    mean_kl: float
    nudged_kl: float
    top1: float
    nudged_top1: float
    prefill_kl: float
    max_difference: float
    median_difference: float
    greedy_equal: int
    greedy_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    expected_TV: NDArray[np.float32]
    nudged_TV: list[NDArray[np.float32]]
    found_TV: NDArray[np.float32]
    prefill_V: NDArray[np.float32]
    prompt: int
    answer: list[int]


def check(model: PteModel, weights: Weights, prompts: Sequence[Sequence[int]]) -> Figures:
    """Compare prefill and decode of the file with eager torch on each prompt and its answer.

    Raises PippinError, with the figures, where they differ by more than rounding.
    """
    figures = _figures([_run(model, weights, list(prompt)) for prompt in prompts])
    kl_limit = KL_FACTOR * figures.nudged_kl + KL_OFFSET
    top1_limit = figures.nudged_top1 - TOP1_SLACK
    # Written so that a figure that is not a number fails.
    kept = figures.mean_kl <= kl_limit and figures.top1 >= top1_limit
    if not (kept and figures.prefill_kl <= 2 * kl_limit):
        measured = ", ".join(f"{name} {value:.4g}" for name, value in asdict(figures).items())
        raise PippinError(
            f"executorch: the .pte does not compute what the quantized model does: {measured}",
            f"mean_kl may be {kl_limit:.4g}, prefill_kl twice that, top1 no less than "
            f"{top1_limit:.4g}; use the versions of executorch and torch that pippin names",
        )
    return figures


def eager_logits(weights: Weights, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Logits after every token, (T, V) float32, of the program that was exported."""
    with torch.no_grad(), without_harmless_lines():
        ids_BT = torch.tensor([list(tokens)], dtype=torch.long)
        return Decoder(weights, every=True)(ids_BT, torch.tensor([0]))[0].numpy()


def _run(model: PteModel, weights: Weights, prompt: list[int]) -> _Row:
    room = min(GREEDY_TOKENS, weights.shape.context - len(prompt))
    steps = model.generate([np.array(prompt)], Sampling(max_tokens=room))
    answer = [int(step[0]) for step in steps if step[0] is not None]
    row = prompt + answer
    return _Row(
        expected_TV=eager_logits(weights, row),
        nudged_TV=[_nudged_logits(weights, row, seed) for seed in range(NUDGES)],
        found_TV=model.logits(row),
        prefill_V=model.last_logits(prompt, 0),
        prompt=len(prompt),
        answer=answer,
    )


def _nudged_logits(weights: Weights, row: list[int], seed: int) -> NDArray[np.float32]:
    random = torch.Generator().manual_seed(seed)

    def nudge(module: torch.nn.Module, inputs: tuple[Tensor, ...], out_BTD: Tensor) -> Tensor:
        return out_BTD * (1 + NUDGE * torch.randn(out_BTD.shape, generator=random))

    hook = weights.entry.embedding.register_forward_hook(nudge)
    try:
        return eager_logits(weights, row)
    finally:
        hook.remove()


def _figures(rows: list[_Row]) -> Figures:
    expected, found = _joined(r.expected_TV for r in rows), _joined(r.found_TV for r in rows)
    nudged = [_joined(r.nudged_TV[i] for r in rows) for i in range(NUDGES)]
    prefill = np.stack([r.prefill_V for r in rows])
    decoded = np.stack([r.found_TV[r.prompt - 1] for r in rows])
    difference = np.abs(found - expected)
    return Figures(
        prompts=len(rows),
        tokens=len(expected),
        mean_kl=_kl(expected, found),
        nudged_kl=float(np.mean([_kl(expected, other) for other in nudged])),
        top1=_top1(expected, found),
        nudged_top1=float(np.mean([_top1(expected, other) for other in nudged])),
        prefill_kl=_kl(decoded, prefill),
        max_difference=float(difference.max()),
        median_difference=float(np.median(difference)),
        greedy_equal=sum(map(_greedy_equal, rows)),
        greedy_tokens=sum(len(r.answer) for r in rows),
    )


def _joined(parts: Iterable[NDArray[np.float32]]) -> NDArray[np.float32]:
    return np.concatenate(list(parts))


def _kl(p_TV: NDArray[np.float32], q_TV: NDArray[np.float32]) -> float:
    p_TV, q_TV = log_softmax(p_TV), log_softmax(q_TV)
    return float((np.exp(p_TV) * (p_TV - q_TV)).sum(-1).mean())


def _top1(p_TV: NDArray[np.float32], q_TV: NDArray[np.float32]) -> float:
    return float((p_TV.argmax(-1) == q_TV.argmax(-1)).mean())


def _greedy_equal(row: _Row) -> int:
    wanted = row.expected_TV.argmax(-1)[row.prompt - 1 :]
    differ = (i for i, token in enumerate(row.answer) if token != wanted[i])
    return next(differ, len(row.answer))
