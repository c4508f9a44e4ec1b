"""The gate of a deployed file: prompts through it and its quantized parent, figures, a verdict."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pippin.engines import Scorer
from pippin.events import Event
from pippin.figures import check_text
from pippin.model.tokenizer import Tokenizer
from pippin.targets import Bundle
from pippin.targets.agreement import Greedy, compare, load_parent, require
from pippin.targets.bundle import notice
from pippin.targets.prompts import FEW, gate_prompts

# After so long no further prompt is begun.
SECONDS = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a target's file must keep, and how much of the gate its runtime affords by default.

    Prompts are cut to `tokens` and answered as `greedy` says; the first `prompts` of them always,
    the others as long as the gate has taken less than SECONDS. With the recipe's deploy.full_gate
    all are taken whole, and answered token by token.
    """

    target: str
    max_kl: float
    min_top1: float
    prompts: int = FEW
    tokens: int | None = None
    greedy: Greedy = Greedy()


def gate(
    bundle: Bundle, tokenizer: Tokenizer, limits: Limits, load: Callable[[], Scorer]
) -> Generator[Event, None, dict[str, Any]]:
    """The figures for deploy.json. Raises PippinError, with them, where the file misses a limit."""
    full = bundle.full_gate
    prompts, left_out = gate_prompts(tokenizer, bundle.context, None)
    yield from (notice(limits.target, text) for text in left_out)
    started = time.perf_counter()
    model = load()
    loaded = time.perf_counter() - started
    asked = prompts if full else [prompt[: limits.tokens] for prompt in prompts]
    agreement = compare(
        model,
        load_parent(bundle.quantized),
        asked if full else _in_time(asked, limits.prompts),
        bundle.context,
        Greedy() if full else limits.greedy,
    )
    figures = require(limits.target, agreement, limits.max_kl, limits.min_top1)
    cut_to = None if full else limits.tokens
    figures |= {"of_prompts": len(prompts), "cut_to": cut_to, "load_seconds": loaded}
    short = cut_to or agreement.prompts < len(prompts)
    more = "; deploy.full_gate = true takes all, whole" if short else ""
    yield notice(limits.target, check_text(figures) + more)
    return figures


def _in_time(prompts: Sequence[list[int]], least: int) -> Iterator[list[int]]:
    """The first `least` prompts, then one more as long as there is time."""
    started = time.perf_counter()
    for done, prompt in enumerate(prompts):
        if done >= least and time.perf_counter() - started > SECONDS:
            return
        yield prompt
