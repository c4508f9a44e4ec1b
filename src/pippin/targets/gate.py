"""The gate of a deployed file: prompts through it and its quantized parent, figures, a verdict."""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from pippin.engines import Scorer
from pippin.events import Event
from pippin.model.tokenizer import Tokenizer
from pippin.targets import Bundle
from pippin.targets.agreement import Greedy, compare, load_parent, require
from pippin.targets.bundle import notice
from pippin.targets.prompts import FEW, gate_prompts


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a target's file must keep, and how much of the gate its runtime affords by default.

    `prompts` are cut to `tokens` and answered as `greedy` says; with the recipe's deploy.full_gate
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
    count, tokens = (None, None) if full else (limits.prompts, limits.tokens)
    prompts, left_out = gate_prompts(tokenizer, bundle.context, count)
    yield from (notice(limits.target, text) for text in left_out)
    started = time.perf_counter()
    model = load()
    loaded = time.perf_counter() - started
    agreement = compare(
        model,
        load_parent(bundle.quantized),
        [prompt[:tokens] for prompt in prompts],
        bundle.context,
        Greedy() if full else limits.greedy,
    )
    figures = require(limits.target, agreement, limits.max_kl, limits.min_top1)
    return figures | {"load_seconds": loaded}
