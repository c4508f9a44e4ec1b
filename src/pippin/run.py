"""Walks a plan: skips what is done, refuses what was made otherwise, yields all events."""

import importlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pippin import artifact
from pippin.artifact import Origin
from pippin.data.dataset import data_digest
from pippin.engines import check_family
from pippin.errors import GateError, PippinError, Refusal, UsageError
from pippin.events import Event, Finished, Notice
from pippin.job import Job
from pippin.lock import locked
from pippin.machine.watermarks import set_watermarks
from pippin.model.names import CONFIG
from pippin.plan import Plan, make_plan
from pippin.stages import checkpoints
from pippin.stages.evaluate import read_scores
from pippin.stages.gates import check_gates
from pippin.stages.together import leading
from pippin.steps import WHY_NOT, Step, defaults
from pippin.targets import check_recipe, missing_packages
from pippin.versions import versions


def run(plan: Plan, only: str | None = None, redo: Collection[str] = ()) -> Iterator[Event]:
    """Do every step that is not done; with `only`, the steps of that stage alone.

    `redo` names stages that are made again although they are there. Raises PippinError for a step
    made from other settings, for an earlier one that is missing, for what the plan refuses, and
    GateError after the report is written.
    """
    plan.raise_refusals()
    if plan.recipe.model.engine == "torch":
        for text in set_watermarks(plan.device, os.environ):
            yield Notice(stage="run", text=text)
    with leading(plan.recipe.model), locked(plan.folder):
        walk = Walk(plan=plan, redo=frozenset(redo))
        try:
            yield from walk.only(only) if only else walk.all()
        except GateError:
            report(plan)
            raise
        report(plan)


def fetch_model(plan: Plan) -> Iterator[Event]:
    """Only bring the model here, where it is not."""
    with locked(plan.folder):
        for step in plan.steps:
            if step.stage == "fetch":
                yield from Walk(plan=plan, redo=frozenset()).step(step)


def report(plan: Plan) -> Path:
    """Write report.html from what the run has made so far; the page's path."""
    from pippin.report import write_report

    if not plan.folder.is_dir():
        raise PippinError(f"there is no run in {plan.folder} yet", "`pippin run RECIPE` first")
    return write_report(plan.folder, plan.recipe.name, plan.recipe)


@dataclass
class Walk:
    """Goes through steps of a plan; what it has read of a folder it keeps."""

    plan: Plan
    redo: frozenset[str]
    digests: dict[Path, str] = field(default_factory=dict)

    def all(self) -> Iterator[Event]:
        for step in self.plan.steps:
            if artifact.read_manifest(step.folder) is None:
                artifact.refuse_foreign(step.folder)  # before hours of work, not after
        if not self.deployed():
            lacking = missing_packages(self.plan.recipe.deploy.targets)
            replace(self.plan, refusals=tuple(lacking)).raise_refusals()
        yield from self.fetch()
        failed: dict[Path | None, PippinError] = {}
        for step in self.plan.steps:
            if step.stage == "deploy":
                yield from self.attempt(step, failed)
            elif step.stage != "fetch" and step.inputs.get("bundle") not in failed:
                yield from self.step(step)
        self.raise_all(list(failed.values()))

    def only(self, stage: str) -> Iterator[Event]:
        """The steps of one stage, after checking that what they read is there and up to date."""
        steps = [step for step in self.plan.steps if step.stage == stage]
        if not steps:
            raise PippinError(f"this recipe has no {stage} stage", WHY_NOT[stage])
        if others := sorted(self.redo - {"fetch", stage, "all"}):
            raise UsageError(
                f"--redo {others[0]} is not for `pippin {stage}`, which makes that stage alone",
                f"`pippin {others[0]} RECIPE --redo {others[0]}`, or `pippin run RECIPE --redo "
                f"{others[0]}`",
            )
        yield from self.fetch()
        failed: dict[Path | None, PippinError] = {}
        for step in steps:
            missing = self.missing(step)
            if missing is None:
                yield from self.attempt(step, failed) if stage == "deploy" else self.step(step)
            elif stage == "evaluate" and step is not steps[0]:
                yield Notice(stage=stage, text=f"{step.subject} left out: no {missing.name} yet")
            else:
                raise PippinError(
                    f"{step.name} needs {missing.folder}, which is not there",
                    f"`pippin {missing.stage} RECIPE` first, or `pippin run RECIPE` for all of it",
                )
        self.raise_all(list(failed.values()))

    def raise_all(self, failed: list[PippinError]) -> None:
        """Raise what went wrong on the way, as one error."""
        if len(failed) == 1:
            raise failed[0]
        replace(
            self.plan, refusals=tuple((error.message, error.hint) for error in failed)
        ).raise_refusals()

    def attempt(self, step: Step, failed: dict[Path | None, PippinError]) -> Iterator[Event]:
        """One of several formats: where it fails, the others are made all the same."""
        try:
            yield from self.step(step)
        except PippinError as error:
            failed[step.folder] = error
            if len(self.plan.recipe.deploy.targets) == 1:
                return
            yield Notice(stage=step.stage, text=f"{step.subject} is not deployed: {error.message}")

    def fetch(self) -> Iterator[Event]:
        """Get the model, then ask what only it can tell: who refuses it, whether all will fit."""
        for step in self.plan.steps:
            if step.stage == "fetch":
                yield from self.step(step)
        make_plan(self.plan.recipe, self.plan.machine).raise_refusals()
        refusals = _engine_refusals(self.plan)
        if not self.deployed():
            refusals += check_recipe(self.plan.recipe, self.plan.model)
        replace(self.plan, refusals=tuple(refusals)).raise_refusals()

    def deployed(self) -> bool:
        """Whether every target's file is there."""
        deploys = [step for step in self.plan.steps if step.stage == "deploy"]
        return all(self.state(step) == [] for step in deploys)

    def missing(self, step: Step) -> Step | None:
        """The first step this one builds on that is not there; raises for one out of date."""
        for parent in self.parents(step):
            changed = self.state(parent)
            if changed is None:
                return parent
            if changed:
                self.refuse_other_settings(parent, changed)
                raise PippinError(
                    f"{parent.folder} is out of date: {'; '.join(changed)}",
                    f"`pippin {parent.stage} RECIPE` first, or `pippin run RECIPE` for all of it",
                )
        return None

    def parents(self, step: Step) -> list[Step]:
        """Every step this one builds on, directly or not, in the order of the plan."""
        needed = set(step.inputs.values())
        found = []
        for other in reversed(self.plan.steps):
            if other.folder in needed:
                needed |= set(other.inputs.values())
                found.append(other)
        return found[::-1]

    def step(self, step: Step) -> Iterator[Event]:
        """One step: skipped, refused, or made."""
        changed = self.state(step)
        if changed == [] and not self.again(step):
            yield self.skipped(step)
            self.judge(step)
            return
        if changed and not self.again(step):
            self.refuse_other_settings(step, changed)
            yield Notice(stage=step.stage, text=f"{step.name} is made again: {'; '.join(changed)}")
        yield from self.make(step)

    def again(self, step: Step) -> bool:
        return step.stage in self.redo or "all" in self.redo

    def state(self, step: Step) -> list[str] | None:
        return artifact.differences(step.folder, self.origin(step))

    def judge(self, step: Step) -> None:
        """Gates are no part of a measurement: one that was changed is checked again."""
        if step.stage == "evaluate" and (scores := read_scores(step.folder)):
            check_gates(step.subject, scores, self.plan.recipe.gates)

    def skipped(self, step: Step) -> Finished:
        manifest = artifact.read_manifest(step.folder)
        assert manifest is not None
        return Finished(
            stage=step.stage, folder=str(step.folder), summary=manifest["scores"], skipped=True
        )

    def refuse_other_settings(self, step: Step, changed: list[str]) -> None:
        """Only new parents, or damage to its own files, let a step be made again unasked."""
        parents = {f"input {role}" for role, folder in step.inputs.items() if self.ours(folder)}
        other = [c for c in changed if c not in parents and not c.startswith("file ")]
        if other:
            raise PippinError(
                f"{step.folder} was made from other settings: {'; '.join(other)}",
                f"add `--redo {step.stage}` to make it again, or give the recipe another `out`",
            )

    def ours(self, folder: Path) -> bool:
        return any(step.folder == folder for step in self.plan.steps)

    def make(self, step: Step) -> Iterator[Event]:
        self.forget(step)
        need = self.plan.needs.get(step.name)
        job = Job(
            stage=step.stage,
            recipe=self.plan.recipe,
            inputs=step.inputs,
            folder=step.folder,
            origin=self.origin(step),
            subject=step.subject,
            memory=need.memory if need else None,
        )
        yield from stage_function(step.stage)(job)
        self.digests.pop(step.folder, None)

    def forget(self, step: Step) -> None:
        """Asked to redo a stage, drop what an unfinished attempt left of it too."""
        if self.again(step):
            checkpoints.forget(step.folder)

    def origin(self, step: Step) -> Origin:
        inputs = {role: self.digest(folder) for role, folder in step.inputs.items()}
        if step.reads_data:
            inputs["data"] = self.data_digest()
        return Origin(
            stage=step.stage,
            inputs=inputs,
            settings=step.settings,
            versions=versions(),
            defaults=defaults(),
        )

    def digest(self, folder: Path) -> str:
        """A parent's digest; every folder is read once in a run."""
        if folder not in self.digests:
            self.digests[folder] = artifact.digest(folder) if folder.exists() else "not there"
        return self.digests[folder]

    def data_digest(self) -> str:
        key = Path("data")
        if key not in self.digests:
            self.digests[key] = data_digest(self.plan.recipe.data, self.plan.recipe.folder)
        return self.digests[key]


def stage_function(stage: str) -> Any:
    """`pippin.stages.<stage>.<stage>`, imported when it is its turn."""
    return getattr(importlib.import_module(f"pippin.stages.{stage}"), stage)


def with_refusals(plan: Plan) -> Plan:
    """The plan with what engine and targets refuse: packages they lack, and models once fetched."""
    if not plan.needs:
        text = "is not here yet: what it needs is told once `pippin data RECIPE` has fetched it"
        plan = replace(plan, notices=(*plan.notices, f"{plan.recipe.model.source} {text}"))
    lacking = [] if plan.machine.elsewhere else missing_packages(plan.recipe.deploy.targets)
    here = (plan.model / CONFIG).is_file()
    asked = [*_engine_refusals(plan), *check_recipe(plan.recipe, plan.model)] if here else []
    plan = _with_environment(plan)
    return replace(plan, refusals=(*plan.refusals, *lacking, *asked))


def _with_environment(plan: Plan) -> Plan:
    """The plan with what a run would say of the variables that PyTorch reads, none of them set."""
    if plan.machine.elsewhere or plan.recipe.model.engine != "torch":
        return plan
    try:
        told = set_watermarks(plan.device, dict(os.environ))
    except UsageError as error:
        return replace(plan, refusals=(*plan.refusals, (error.message, error.hint)))
    return replace(plan, notices=(*plan.notices, *told))


def _engine_refusals(plan: Plan) -> list[Refusal]:
    refusal = check_family(plan.recipe.model.engine, plan.model)
    return [refusal] if refusal else []


def done_steps(plan: Plan) -> set[str]:
    """Names of the steps that are on disk, made as the plan would make them."""
    walk = Walk(plan=plan, redo=frozenset())
    return {step.name for step in plan.steps if walk.state(step) == []}
