"""The gate of a deployed file: prompts through it and its quantized parent, figures, a verdict."""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from pippin.engines import Scorer
from pippin.events import Event
from pippin.figures import check_text
from pippin.model.tokenizer import Tokenizer
from pippin.targets import PROMPTS, Bundle
from pippin.targets.agreement import Effort, compare, load_parent, require
from pippin.targets.bundle import notice
from pippin.targets.prompts import gate_prompts


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a target's file must keep, and what its runtime affords for a prompt."""

    target: str
    max_kl: float
    min_top1: float
    effort: Effort = Effort()


def gate(
    bundle: Bundle, tokenizer: Tokenizer, limits: Limits, load: Callable[[], Scorer]
) -> Generator[Event, None, dict[str, Any]]:
    """The figures for deploy.json. Raises PippinError, with them, where the file misses a limit."""
    prompts, left_out = gate_prompts(tokenizer, bundle.context, bundle.gate_prompts)
    yield from (notice(limits.target, text) for text in left_out)
    started = time.perf_counter()
    model = load()
    loaded = time.perf_counter() - started
    parent = load_parent(bundle.quantized)
    agreement = compare(model, parent, prompts, bundle.context, limits.effort)
    figures = require(limits.target, agreement, limits.max_kl, limits.min_top1)
    figures |= {"of_prompts": PROMPTS, "load_seconds": loaded}
    yield notice(limits.target, check_text(figures))
    return figures
