"""The limits a recipe sets for a measured stage, and what to do where one is missed."""

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pippin.errors import GateError
from pippin.recipe import Gate, Gates

# limit: (score, its name for people, decimals that tell two values apart)
MEASURES = {
    "max_kl": ("kl", "KL", 4),
    "min_top1": ("top1", "top-1 agreement", 3),
    "min_gain_kept": ("gain_kept", "gain kept", 3),
    "min_exact_match": ("exact_match", "exact match", 3),
}
# How far below its parent a figure may be where both were measured on few rows.
SLACK = 0.005
# Standard errors that a share of an adapter's gain may lie below its limit: more is not chance.
ERRORS = 2
HINTS = {
    "adapter": "train longer (train.epochs), raise train.learning_rate or lora.rank, "
    "or lower gates.adapter",
    "merged": "the merged weights' dtype rounds the adapter away: use a float32 or bfloat16 base, "
    "or change gates.merged",
    "quantized": "raise quantize.bits or quantize.embed_bits, choose a smaller group_size, "
    "list sensitive tensors in quantize.keep, tune scales (quantize.recover_tokens to the model "
    "before, qat.steps to the answers), or change gates.quantized",
    "deployed": "the file does not compute what the quantized model does: compare the answers in "
    "its scores.json, or change gates.deployed",
}


def gate_name(subject: str) -> str:
    """The gate of a subject: `deployed-executorch` and its like share one."""
    return "deployed" if subject.startswith("deployed") else subject


def gate_of(subject: str, gates: Gates) -> Gate:
    """The limits of a subject; none for the base."""
    return getattr(gates, gate_name(subject), Gate())


def limits(gate: Gate) -> dict[str, float]:
    """The limits that are set, by name."""
    named = {field.name: getattr(gate, field.name) for field in fields(gate)}
    return {name: bound for name, bound in named.items() if bound is not None}


def missed(scores: Mapping[str, Any], gate: Gate) -> list[str]:
    """Every missed limit in words; a limit on what was not measured counts as missed.

    But for one on an adapter's gain where none can be told from chance, as the evaluation says.
    """
    found = (_missed(scores, limit, bound) for limit, bound in limits(gate).items())
    return [text for text in found if text]


def let_pass(scores: Mapping[str, Any], gate: Gate) -> list[str]:
    """In words, every figure below its limit by no more than chance may explain."""
    reasons = {
        "gain_kept": f"within {ERRORS} standard errors of {scores.get('gain_kept_error', 0.0):.3f}",
        "top1": f"by one of {scores.get('tokens')} positions",
    }
    found = []
    for limit, bound in limits(gate).items():
        key, name, decimals = MEASURES[limit]
        value, by_parent = scores.get(key), key in scores.get("same_rows", {})
        if key not in reasons or by_parent or value is None or _missed(scores, limit, bound):
            continue
        if value < bound:
            below = f"{name} {_apart(value, bound, decimals)} is below {limit} {bound}"
            found.append(f"{below}, {reasons[key]}: more held-out rows would tell")
    return found


def _missed(scores: Mapping[str, Any], limit: str, bound: float) -> str | None:
    key, name, decimals = MEASURES[limit]
    value = scores.get(key)
    # On a few rows chance decides how many are answered: the parent's figure on these is enough.
    fair = scores.get("same_rows", {}).get(key)
    bound = bound if fair is None else min(bound, round(fair - SLACK, decimals))
    if key == "gain_kept" and scores.get("no_gain"):
        return None
    if key == "top1" and bound < 1 and (tokens := scores.get("tokens")):
        # One position of a few is no share: two near equal tokens may change places by rounding.
        bound = min(bound, math.floor(1e6 * (1 - 1 / tokens)) / 1e6)
    if value is None:
        return f"{name} was not measured, {limit} is {bound}"
    # Written so that a NaN misses every limit.
    error = scores.get(f"{key}_error", 0.0)
    kept = value <= bound if limit.startswith("max") else value + ERRORS * error >= bound
    sign = ">" if limit.startswith("max") else "<"
    text = f"{name} {_apart(value, bound, decimals)} {sign} {limit} {bound}"
    return None if kept else text + (f" (standard error {error:.3f})" if error else "")


def _apart(value: float, bound: float, decimals: int) -> str:
    """The value with as many decimals as tell it from its bound."""
    text = f"{value:.{decimals}f}"
    return text if float(text) != bound or not math.isfinite(value) else f"{value:.6g}"


def check_gates(subject: str, scores: Mapping[str, Any], gates: Gates) -> None:
    """Raise GateError with the figures of every limit that the scores of a subject miss."""
    found = missed(scores, gate_of(subject, gates))
    if found:
        raise GateError(f"{subject}: {'; '.join(found)}", HINTS[gate_name(subject)])
