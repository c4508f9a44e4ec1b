"""Runs one probe and turns its largest error into a verdict."""

import math
import time

from pippin.check import WRONG, Finding, NotThere, Probe, Verdict
from pippin.errors import PippinError, first_line

# What frameworks raise where a device cannot do something: loud, so nobody computes with it.
REFUSALS = (RuntimeError, TypeError, ValueError, AttributeError, ImportError, LookupError)


def judge(probe: Probe) -> Finding:
    """The finding of a probe; a framework's refusal is `not there`, ours is `wrong`."""
    start = time.perf_counter()
    try:
        where, figure = _worst(probe)
    except NotThere as reason:
        return finding(probe, "not there", detail=str(reason))
    except PippinError as error:  # our own checks of the engine saw it first
        return finding(probe, "wrong", detail=error.message)
    except REFUSALS as error:
        return finding(probe, "not there", detail=f"{type(error).__name__}: {first_line(error)}")
    seconds = time.perf_counter() - start
    return finding(probe, verdict(figure, probe.tolerance), figure, where, seconds)


def verdict(figure: float, tolerance: float) -> Verdict:
    """Within the tolerance, somewhat beyond it, or no rounding any more."""
    if figure <= tolerance:
        return "pass"
    return "inaccurate" if figure <= WRONG * tolerance else "wrong"


def finding(
    probe: Probe,
    verdict: Verdict,
    figure: float | None = None,
    detail: str = "",
    seconds: float = 0.0,
) -> Finding:
    """The probe's finding with its remedy, where one is needed."""
    needed = verdict in ("inaccurate", "wrong")
    return Finding(
        probe=probe.name,
        verdict=verdict,
        figure=figure,
        tolerance=probe.tolerance,
        detail=detail,
        remedy=probe.remedy if needed else "",
        avoid=probe.avoid if needed else "",
        seconds=round(seconds, 3),
    )


def _worst(probe: Probe) -> tuple[str, float]:
    cases = list(probe.cases())
    assert cases, f"probe {probe.name} measured nothing"
    return max(cases, key=lambda case: math.inf if math.isnan(case[1]) else case[1])
