"""Train an adapter, every weight, or a small model's scales: goes on after any stop."""

import math
import shutil
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from pippin import artifact, disk
from pippin.data.batches import Batch
from pippin.data.beginnings import shared_share, shared_text
from pippin.engines import Engine, Trainer, Weights
from pippin.errors import Interrupted, PippinError
from pippin.events import Event, Finished, Metric, Notice, Progress, Started
from pippin.figures import counted
from pippin.job import Job
from pippin.recipe import Train
from pippin.stages.checkpoints import METRICS, Position, Store, forget, work_folder
from pippin.stages.guard import SETTLED, Guard, out_of_memory
from pippin.stages.interrupts import watching
from pippin.stages.loading import open_engine
from pippin.stages.outcome import first_weights, write_outcome
from pippin.stages.preparing import Material, prepare
from pippin.stages.schedule import WINDOW, fault, learning_rate, total_steps


def train(job: Job) -> Iterator[Event]:
    """Train and write the adapter (a PEFT folder) or the model (a Hugging Face folder)."""
    lora = job.recipe.train.method == "lora"
    title = f"train a rank {job.recipe.lora.rank} adapter" if lora else "train every weight"
    yield from follow(job, Course(title=title, begin=_begin, write=write_outcome))


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """What is trained: `begin` makes its trainer, `write` fills a folder with what came of it.

    `after` is the training whose rows come before these. `compared` tells that what it starts from
    is kept where nothing better comes.
    """

    title: str
    begin: Callable[[Job, Engine], Trainer]
    write: Callable[[Path, Job, Weights], None]
    after: Train | None = None
    compared: bool = False


def follow(job: Job, course: Course) -> Iterator[Event]:
    """Train as the job's recipe says.

    Goes on from the newest checkpoint of the same training. Raises Interrupted after Ctrl-C, with a
    checkpoint written; PippinError where the loss is not finite or jumps, or the disk is full.
    """
    artifact.refuse_foreign(job.folder)
    material = prepare(job)
    yield Started(stage=job.stage, title=course.title, total=material.total, unit="steps")
    yield from _notices(job, material.notices)
    with disk.disk_errors(job.folder):
        store = _open_store(job, material)
        found = store.latest()
        run = _load(job, course, material, store)
        yield from _notices(job, (_device(run), *run.trainer.notices, *found.notices))
        yield from _notices(job, shared_text(run.shared))
        position = found.position
        if found.state is not None:
            run.trainer.restore(found.state)
            yield Notice(stage=job.stage, text=f"going on after update {position.step}")
        elif course.compared and material.valid:
            position = yield from _validate(run, position)
            yield from _notices(job, (f"validation loss before: {position.best_loss:.4f}",))
        position = yield from _loop(run, position)
        yield from _finish(run, position)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """One training, loaded; `first` is its first update in the order of all rows.

    `shared` is the share of its tokens that are computed for another sample.
    """

    job: Job
    course: Course
    first: int
    material: Material
    store: Store
    engine: Engine
    trainer: Trainer
    guard: Guard
    process: psutil.Process
    shared: float

    @property
    def train(self) -> Train:
        return self.job.recipe.train

    def batches(self, step: int) -> Sequence[Batch]:
        plan, total = self.material.plan, self.material.total
        return plan.batches(self.first + step) if step < total else ()

    def over(self, position: Position) -> bool:
        patience = self.train.patience
        return position.step >= self.material.total or 0 < patience <= position.worse

    def validates(self, step: int) -> bool:
        every = self.train.valid_every
        due = step == self.material.total or (every > 0 and step % every == 0)
        return due and bool(self.material.valid)

    def saves(self, position: Position) -> bool:
        every = self.train.checkpoint_every
        return every > 0 and (position.step % every == 0 or self.over(position))


def _open_store(job: Job, material: Material) -> Store:
    return Store(
        folder=work_folder(job.folder),
        origin=job.origin,
        plan=material.digest(),
        keep=job.recipe.train.keep_checkpoints,
    )


def _load(job: Job, course: Course, material: Material, store: Store) -> _Run:
    engine = open_engine(job.recipe.model)
    guard = Guard(engine=engine, planned=job.memory, before=engine.peak_memory())
    before, trainer = course.after, course.begin(job, engine)
    return _Run(
        job=job,
        course=course,
        first=total_steps(before, material.plan.steps_per_epoch) if before else 0,
        material=material,
        store=store,
        engine=engine,
        trainer=trainer,
        guard=guard,
        process=psutil.Process(),
        shared=shared_share(material.plan) if trainer.shares else 0.0,
    )


def _begin(job: Job, engine: Engine) -> Trainer:
    recipe, weights = job.recipe, first_weights(job)
    model = engine.load(job.inputs["model"], recipe.model.dtype)
    lora = recipe.lora if recipe.train.method == "lora" else None
    return model.trainer(recipe.train, lora, weights, recipe.seed)


def _loop(run: _Run, position: Position) -> Generator[Event, None, Position]:
    yield Progress(stage=run.job.stage, done=position.step, values={})
    settled = position.step + SETTLED
    with watching() as watch:
        while not run.over(position):
            position = yield from _update(run, position)
            if position.step == settled and (text := run.guard.settle()):
                yield Notice(stage=run.job.stage, text=text)
            if run.validates(position.step):
                position = yield from _validate(run, position)
            scarce = None if run.over(position) else run.guard.scarcity()
            if watch.asked or scarce or run.saves(position):
                run.store.save(position, run.trainer.state())
            if scarce:
                raise out_of_memory(scarce, position.step, run.material.total)
            if watch.asked:
                raise Interrupted(
                    f"stopped after update {position.step} of {run.material.total}, "
                    "a checkpoint is written",
                    "run the same command again to go on",
                )
    return position


def _update(run: _Run, position: Position) -> Generator[Event, None, Position]:
    start = time.perf_counter()
    batches = run.batches(position.step)
    rate = learning_rate(run.train, position.step, run.material.total)
    result = run.trainer.step(batches, rate, partial(run.batches, position.step + 1))
    loss = result.loss_sum / result.tokens
    wrong = fault(loss, result.grad_norm, position.recent, run.train.spike)
    if wrong:
        raise _stopped(run, position, batches, wrong)
    seconds = time.perf_counter() - start
    tokens = sum(batch.real_tokens for batch in batches)
    values = {
        "loss": loss,
        "learning_rate": rate,
        "grad_norm": result.grad_norm,
        "tokens_per_second": tokens / seconds,
        "memory_bytes": run.process.memory_info().rss,
    }
    position = replace(
        position,
        step=position.step + 1,
        tokens=position.tokens + tokens,
        seconds=position.seconds + seconds,
        recent=tuple(deque((*position.recent, loss), WINDOW)),
    )
    return (yield from _record(run, position, values))


def _validate(run: _Run, position: Position) -> Generator[Event, None, Position]:
    """Score the validation rows; keep the weights where they are the best so far."""
    start = time.perf_counter()
    sums = [run.trainer.loss(batch) for batch in run.material.valid]
    loss = math.fsum(total for total, _ in sums) / sum(count for _, count in sums)
    if not math.isfinite(loss):
        raise _stopped(run, position, run.material.valid, f"the validation loss is {loss}")
    better = position.best_loss is None or loss < position.best_loss
    if better:
        run.store.save_best(position.step, run.trainer.weights())
    position = replace(
        position,
        seconds=position.seconds + time.perf_counter() - start,
        best_step=position.step if better else position.best_step,
        best_loss=loss if better else position.best_loss,
        worse=0 if better else position.worse + 1,
    )
    position = yield from _record(run, position, {"valid_loss": loss})
    if run.over(position) and position.step < run.material.total:
        text = f"no better validation loss in {counted(position.worse, 'validation')}: ending early"
        yield Notice(stage=run.job.stage, text=text)
    return position


def _record(
    run: _Run, position: Position, values: dict[str, float]
) -> Generator[Event, None, Position]:
    length = run.store.append({"step": position.step, **values})
    yield Metric(stage=run.job.stage, step=position.step, values=values)
    yield Progress(stage=run.job.stage, done=position.step, values=values)
    return replace(position, metrics_bytes=length)


def _stopped(run: _Run, position: Position, batches: Sequence[Batch], wrong: str) -> PippinError:
    newest = run.store.newest()
    good = f"the last good checkpoint is {newest}" if newest else "no checkpoint was written yet"
    return PippinError(
        f"update {position.step + 1}: {wrong}; its rows: {run.material.places(batches)}",
        f"{good}; look at those rows, raise train.spike to go on past a jump, or lower "
        f"{run.job.stage}.learning_rate and start anew with --redo {run.job.stage}",
    )


def _finish(run: _Run, position: Position) -> Iterator[Event]:
    """Write the best weights by validation, the last where nothing was validated."""
    summary = _summary(run, position)
    if position.best_step is None:
        weights = run.trainer.weights()
    else:
        weights = run.store.best(position.best_step)
        if position.best_step < position.step:
            text = f"the weights after update {position.best_step} are kept: the best validation"
            yield Notice(stage=run.job.stage, text=text)
    with artifact.writing(run.job.folder, run.job.origin, summary) as folder:
        run.course.write(folder, run.job, weights)
        shutil.copyfile(run.store.metrics, folder / METRICS)
    forget(run.job.folder)
    yield Finished(stage=run.job.stage, folder=str(run.job.folder), summary=summary)


def _summary(run: _Run, position: Position) -> dict[str, Any]:
    return {
        "steps": position.step,
        "best_step": position.best_step,
        "valid_loss": position.best_loss,
        "tokens": position.tokens,
        "shared": run.shared,
        "seconds": position.seconds,
        "peak_memory_bytes": run.engine.peak_memory(),
    }


def _notices(job: Job, texts: Sequence[str]) -> Iterator[Event]:
    yield from (Notice(stage=job.stage, text=text) for text in texts)


def _device(run: _Run) -> str:
    """What `auto` picked is said, not only what was asked for."""
    model = run.job.recipe.model
    return f"{model.engine} on {run.engine.device()}, {run.engine.dtype(model.dtype)}"
