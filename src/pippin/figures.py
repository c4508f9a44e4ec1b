"""Numbers as people read them: bytes, durations, losses, shares."""

import math
import re
from collections.abc import Mapping
from typing import Any


def bytes_text(count: float) -> str:
    """1,234,567,890 as `1.23 GB`, in powers of 1000."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def bytes_of(text: str) -> int | None:
    """`1.9GB` as 1,900,000,000, in powers of 1000; None for a text that is no size above zero."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)b\s*", text.lower())
    count = int(float(found[1]) * 1000 ** " kmgt".index(found[2] or " ")) if found else 0
    return count or None


def duration_text(seconds: float) -> str:
    """93 as `1m 33s`; under ten seconds with one decimal."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def count_text(count: float) -> str:
    """134,515,008 as `134.5M`."""
    for unit in ("", "K", "M", "G", "T"):
        if abs(count) < 1000 or unit == "T":
            break
        count /= 1000
    return f"{count:.0f}" if not unit else f"{count:.1f}{unit}"


def counted(count: int, name: str) -> str:
    """1 and "row" as `1 row`, 1,234 as `1,234 rows`; of "held-out row" too."""
    return f"{count:,} {name}" + "s" * (count != 1)


def share_text(share: float) -> str:
    """0.9731 as `97.3%`."""
    return f"{100 * share:.1f}%"


def check_text(check: Mapping[str, Any]) -> str:
    """How a deployed file's check went, in words; what it did not measure is left out.

    `check` is that of deploy.json: speeds are tokens a second, the parent's PyTorch's in float32.
    """
    said = []
    if "prompts" in check:
        count, of = check["prompts"], check.get("of_prompts")
        said.append(
            f"judged on {f'{count} of ' if of else ''}{counted(of or count, 'prompt')}"
            + (f", {counted(check['tokens'], 'token')}" if "tokens" in check else "")
        )
    if "load_seconds" in check:
        said.append(f"loaded in {duration_text(check['load_seconds'])}")
    for key, what in (("prefill_speed", "reads"), ("decode_speed", "answers")):
        if check.get(key) and check.get(f"parent_{key}"):
            said.append(f"{what} {check[key]:.3g} tokens/s (PyTorch {check[f'parent_{key}']:.3g})")
    return "; ".join(said)


def figure_text(name: str, value: float) -> str:
    """A named figure of an event: `loss 1.234`, `1.2 GiB`, `93 tok/s`."""
    if "bytes" in name or "memory" in name:
        return bytes_text(value)
    if "tokens_per_second" in name:
        return f"{count_text(value)} tok/s"
    if name.endswith("seconds"):
        return duration_text(value)
    if name in ("top1", "exact_match", "gain_kept"):
        return share_text(value)
    if float(value).is_integer() and abs(value) >= 1:
        return f"{value:,.0f}"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 else f"{value:.2e}"
