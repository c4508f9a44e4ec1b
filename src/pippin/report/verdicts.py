"""What held and what did not, in a sentence for each hand-off."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pippin.figures import bytes_text, check_text
from pippin.recipe import Gate, Gates
from pippin.report.table import figure, gate_for
from pippin.stages.gates import let_pass, missed

State = Literal["good", "bad", "open", "free"]
Scores = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """`state` is good, bad, open (not measured yet) or free (measured, no gate set)."""

    state: State
    title: str
    lines: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class _HandOff:
    """One hand-off: the stage that is judged and its title by state."""

    subject: str
    good: str
    bad: str
    plain: str

    def title(self, state: State) -> str:
        return {"good": self.good, "bad": self.bad}.get(state, self.plain)


MERGED = _HandOff(
    subject="merged",
    good="Merged equals adapter",
    bad="Merged differs from adapter",
    plain="Merged against adapter",
)
QUANTIZED = _HandOff(
    subject="quantized",
    good="Quantized within its gates",
    bad="Quantized misses its gates",
    plain="Quantized against its parent",
)


def _deployed(subject: str) -> _HandOff:
    name = subject.removeprefix("deployed-").replace("deployed", "Deployed")
    return _HandOff(
        subject=subject,
        good=f"{name} equals quantized",
        bad=f"{name} differs from quantized",
        plain=f"{name} against quantized",
    )


def verdicts(scores: dict[str, Scores], gates: Gates, merges: bool) -> list[Verdict]:
    """A verdict for every hand-off of a run; `scores` by subject.

    `merges` says that the adapter and its base become a model of their own.
    """
    deployed = [name for name in scores if name.startswith("deployed")] or ["deployed"]
    merged = [MERGED] if merges else []
    hand_offs = [*merged, QUANTIZED, *(_deployed(name) for name in deployed)]
    return [_tuned(scores, gates), *(_judge(h, scores.get(h.subject), gates) for h in hand_offs)]


def headline(found: list[Verdict]) -> Verdict:
    """The verdict on the whole run."""
    bad = sum(v.state == "bad" for v in found)
    measured = sum(v.state != "open" for v in found)
    if bad:
        title = "One hand-off lost something" if bad == 1 else f"{bad} hand-offs lost something"
        return Verdict(state="bad", title=title, lines=["the run stopped where a gate was missed"])
    if measured < len(found):
        text = f"{measured} of {len(found)} hand-offs measured so far"
        return Verdict(state="open", title="On its way", lines=[text])
    free = sum(v.state == "free" for v in found)
    text = f"{len(found)} hand-offs measured" + (f", {free} without a gate" if free else "")
    return Verdict(state="good", title="Every gate was kept", lines=[text])


def _tuned(scores: dict[str, Scores], gates: Gates) -> Verdict:
    base, tuned = scores.get("base"), scores.get("adapter")
    if base is None or tuned is None:
        return Verdict(state="open", title="Tuned against base", lines=["not measured yet"])
    faults = missed(tuned, gate_for("adapter", tuned, gates))
    better = tuned["loss"] < base["loss"]
    lines = [_change("loss", "loss", base, tuned), *_exact(base, tuned), *faults]
    if better and not faults:
        return Verdict(state="good", title="Tuned beats base", lines=lines)
    title = "Tuned misses its gates" if better else "Tuned is no better than base"
    return Verdict(state="bad", title=title, lines=lines)


def _exact(base: Scores, tuned: Scores) -> Iterator[str]:
    if base.get("exact_match") is not None and tuned.get("exact_match") is not None:
        yield _change("exact match", "exact_match", base, tuned)


def _change(name: str, key: str, before: Scores, after: Scores) -> str:
    return f"{name} {figure(key, before[key])} → {figure(key, after[key])}"


def _judge(hand_off: _HandOff, scores: Scores | None, gates: Gates) -> Verdict:
    if scores is None:
        return Verdict(state="open", title=hand_off.plain, lines=["not measured yet"])
    gate = gate_for(hand_off.subject, scores, gates)
    faults = missed(scores, gate)
    state: State = "bad" if faults else "free" if gate == Gate() else "good"
    more = ["no gate set"] if state == "free" else let_pass(scores, gate)
    lines = faults or [*_figures(scores), *more]
    return Verdict(state=state, title=hand_off.title(state), lines=lines)


def _figures(scores: Scores) -> Iterator[str]:
    for key, name in (("kl", "KL"), ("top1", "top-1"), ("gain_kept", "gain kept")):
        if scores.get(key) is not None:
            yield f"{name} {figure(key, scores[key])}"
    if "check" in scores:
        yield bytes_text(scores["size_bytes"])
        if text := check_text(scores["check"]):
            yield from text.split("; ")
