"""Tables as they are printed: the plan, the stages side by side, the answers."""

from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pippin.compare import FIGURES
from pippin.figures import bytes_text, count_text, counted, duration_text
from pippin.plan import Plan
from pippin.report.table import NONE, PARTITION, figure
from pippin.steps import Step
from pippin.targets import PROMPTS

UNKNOWN = "?"
# Columns of the summary that fit 80 characters; the report has them all.
SHORT = {
    "stage": "stage",
    "rows": "rows",
    "loss": "loss",
    "kl": "KL",
    "top1": "top-1",
    "exact_match": "exact",
    "gain_kept": "gain",
    "size_bytes": "size",
    "bits_per_weight": "bits",
    "gates": "gates",
}
CAPTION = """\
loss: held-out, nats a token. KL (nats) and top-1: against the stage before.
gain: share of the adapter's gain that is left. bits: per weight, all counted.
rows: held-out rows that were measured, fewer where a runtime is slow here."""
GATE_STYLE = {"passed": "green", "missed": "bold red"}


def summary(rows: list[dict[str, str]]) -> Group:
    """The measured stages, one a row; `rows` as report.summary_table gives them."""
    return Group(_stages(rows), Text(f"{CAPTION}\n", style="dim"))


def _stages(rows: list[dict[str, str]]) -> Table:
    table = _table()
    for key, heading in SHORT.items():
        left = key in ("stage", "gates")
        table.add_column(heading, justify="left" if left else "right", no_wrap=key != "stage")
    names = short_names([row["stage"] for row in rows])
    for row in rows:
        cells = [Text(names.get(row[key], row[key])) for key in SHORT]
        cells[-1].stylize(GATE_STYLE.get(row["gates"], ""))
        table.add_row(*cells)
    return table


def comparison(rows: list[dict[str, Any]]) -> Group:
    """Ways to quantize, one a row; `rows` as compare.comparison gives them."""
    table = _table()
    for heading in ("method", "KL", "top-1", "ppl", "exact", "bits", "size", "time"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for row in rows:
        figures = (figure(key, row[key]) for key in FIGURES)
        table.add_row(row["way"], *figures, duration_text(row["seconds"]))
    caption = "method-bits. KL (nats) and top-1: against the model before. bits: all counted."
    return Group(table, Text(f"{caption}\n", style="dim"))


def partition(rows: list[dict[str, str]], line: str) -> Group:
    """Operators inside and outside a delegate; `rows` and `line` as the report has them.

    Those that multiply, and those that stayed outside; the report has all.
    """
    table = _table()
    for key, heading in PARTITION.items():
        left = key in ("operator", "why")
        table.add_column(heading, justify="left" if left else "right", overflow="fold")
    shown = [row for row in rows if row["share"] != NONE or row["left"] != "0"]
    for row in shown:
        table.add_row(*(Text(row[key]) for key in PARTITION))
    others = sum(int(row["delegated"]) for row in rows if row not in shown)
    if not shown:  # nobody counted the multiplications
        return Group(Text(f"{line}: {others} operators.\n", style="dim"))
    more = f"; {others} more nodes inside multiply no matrices" if others else ""
    return Group(table, Text(f"{line}{more}.\n", style="dim"))


def short_names(stages: list[str]) -> dict[str, str]:
    """`deployed-executorch` as `deployed` where there is only one, else as its target."""
    deployed = [stage for stage in stages if stage.startswith("deployed-")]
    if len(deployed) == 1:
        return {deployed[0]: "deployed"}
    return {stage: stage.removeprefix("deployed-") for stage in deployed}


def answers(prompts: list[tuple[str, dict[str, str]]]) -> Group:
    """Each prompt, and under it what every stage answered."""
    parts: list[Text | Padding | Table] = []
    for prompt, by_stage in prompts:
        parts.append(Text(prompt, style="bold"))
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, style="dim")
        table.add_column(overflow="fold")
        names = short_names(list(by_stage))
        for stage, answer in by_stage.items():
            table.add_row(
                Text(names.get(stage, stage)), Text(" ".join(answer.split()) or "(nothing)")
            )
        parts.append(Padding(table, (0, 0, 1, 2)))
    return Group(*parts)


def plan_facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """What a run computes with, as (name, value)."""
    machine, train = plan.machine, plan.recipe.train
    free, total = bytes_text(machine.memory_available), bytes_text(machine.memory_total)
    shared = ", shared with the GPU" if machine.shared_memory else ""
    cores = "" if machine.elsewhere else f"{counted(machine.cores, 'core')}, "
    yield "machine", f"{machine.chip}, {cores}{free} of {total} free{shared}"
    if machine.accelerator:
        a = machine.accelerator
        yield a.kind, f"{a.name}, {bytes_text(a.memory_available)} free"
    yield "engine", f"{plan.recipe.model.engine} on {plan.device}"
    yield "dtypes", f"trains in {plan.dtype}, evaluates in {plan.recipe.evaluate.dtype}"
    rows = counted(train.batch_rows, "row")
    shape = f"{train.row_tokens} tokens x {rows} x {train.accumulate} accumulated"
    yield "update", f"{plan.tokens_per_step:,} tokens ({shape})"
    if plan.updates:
        total = count_text(plan.updates * plan.tokens_per_step)
        yield "updates", f"{plan.updates:,}, {total} tokens with padding"
    if plan.recipe.deploy.targets:
        count = plan.recipe.deploy.gate_prompts
        yield "gate", f"every deployed file on {count} of {PROMPTS} prompts"
    yield "folder", str(plan.folder)
    yield from (("notice", text) for text in plan.notices)


def plan_steps(plan: Plan, done: set[str]) -> Table:
    """Every step with its forecast."""
    table = _table()
    table.add_column("step", no_wrap=True)
    for heading in ("memory", "disk", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for step in plan.steps:
        state = Text("done before" if step.name in done else "", style="dim")
        table.add_row(Text(step.name), *_need(plan, step), state)
    return table


def plan_ways(plan: Plan) -> Group:
    """How else the recipe can be trained there, the fastest first; its updates stay the same."""
    table = _table()
    table.add_column("the same updates, the fastest that fit", overflow="fold")
    for heading in ("memory", "a token's time, roughly"):
        table.add_column(heading, justify="right", no_wrap=True)
    for way in plan.ways:
        table.add_row(
            Text(way.keys or "as the recipe is"), bytes_text(way.memory), f"{way.pace:.2f}x"
        )
    return Group(table)


def _need(plan: Plan, step: Step) -> tuple[str, str, str]:
    need = plan.needs.get(step.name)
    if need is None:
        return UNKNOWN, UNKNOWN, UNKNOWN
    time = UNKNOWN if need.seconds is None else duration_text(need.seconds)
    return bytes_text(need.memory), bytes_text(need.disk), time


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")


def header(plan: Plan) -> str:
    """One line on what runs where."""
    machine, model = plan.machine, plan.recipe.model
    cores = counted(machine.cores, "core")
    memory = f"{bytes_text(machine.memory_available)} free"
    where = f"{machine.chip}, {cores}, {memory}"
    return f"{plan.recipe.name}: {model.engine} on {plan.device}, {plan.dtype} ({where})"
