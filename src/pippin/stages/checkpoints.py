"""Where an unfinished training goes on from: checkpoints that are on disk whole or not at all.

Next to the stage's folder `train` lies `.train.work`, with one folder a checkpoint (`step-000050`),
the best weights so far (`best-000040`), and the record of all steps (`metrics.jsonl`).
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pippin import artifact, disk
from pippin.artifact import Origin
from pippin.engines import Weights
from pippin.errors import PippinError
from pippin.stages.sealed import RECORD, DamagedError, check, seal, tensors

METRICS = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Where a training stands after `step` updates, beside the trainer's own state.

    `tokens` counts the real tokens trained on, `worse` the validations since the best one, `recent`
    holds the last losses, `metrics_bytes` is the length of the record.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_step: int | None = None
    best_loss: float | None = None
    worse: int = 0
    recent: tuple[float, ...] = ()
    metrics_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What `latest` came upon. Nothing to go on from: step 0 and no state."""

    position: Position
    state: Weights | None
    notices: tuple[str, ...]


def work_folder(folder: Path) -> Path:
    """Where the stage that writes `folder` keeps what it needs to go on."""
    return folder.with_name(f".{folder.name}.work")


def forget(folder: Path) -> None:
    """Drop what an unfinished stage left: it starts anew."""
    disk.retire(work_folder(folder))


@dataclass(frozen=True, kw_only=True, slots=True)
class Store:
    """The checkpoints of one training.

    `origin` and `plan` (a digest of the tokenized samples) tell whether one belongs to it; the last
    `keep` stay, and the best weights that they know of.
    """

    folder: Path
    origin: Origin
    plan: str
    keep: int

    @property
    def metrics(self) -> Path:
        """The record of all steps, one JSON object a line."""
        return self.folder / METRICS

    def append(self, values: dict[str, float]) -> int:
        """Add a line to the record; its length in bytes then."""
        with self.metrics.open("a") as file:
            file.write(json.dumps(values) + "\n")
            return file.tell()

    def save(self, position: Position, state: Weights) -> Path:
        """Write a checkpoint, then drop those that are no longer needed."""
        self.metrics.touch()
        disk.sync_path(self.metrics)
        folder = self._step(position.step)
        record = {
            "position": asdict(position),
            "origin": artifact.record(self.origin),
            "plan": self.plan,
        }
        seal(folder, state, record)
        self._prune(position.step)
        return folder

    def save_best(self, step: int, weights: Weights) -> None:
        """Keep the weights after `step` as the best so far."""
        seal(self._best(step), weights, {})
        if not self._steps():
            self._prune_best({step})

    def best(self, step: int) -> Weights:
        """The weights that `save_best` kept after `step`."""
        try:
            check(self._best(step))
        except DamagedError as error:
            raise PippinError(
                f"the best weights in {self._best(step)} cannot be used: {error}",
                f"--redo {self.origin.stage} starts anew",
            ) from error
        return tensors(self._best(step))

    def latest(self) -> Found:
        """The newest checkpoint that is whole; a notice for each that is not.

        The record is cut to the checkpoint's length. Raises PippinError where the newest belongs to
        a training with other settings, inputs or rows.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._recover()
        notices = []
        for folder in reversed(self._steps()):
            try:
                position, state, changed = self._take(folder)
            except DamagedError as error:
                notices.append(f"checkpoint {folder.name} is damaged ({error}): going back")
                continue
            os.truncate(self.metrics, position.metrics_bytes)
            return Found(position=position, state=state, notices=(*notices, *changed))
        self.metrics.write_bytes(b"")
        return Found(position=Position(), state=None, notices=tuple(notices))

    def newest(self) -> Path | None:
        """The folder of the newest checkpoint."""
        return max(self._steps(), key=_number, default=None)

    def _take(self, folder: Path) -> tuple[Position, Weights, list[str]]:
        record = check(folder)
        try:
            made, plan = record["origin"], record["plan"]
            position = _position(record["position"])
        except (KeyError, TypeError) as error:
            raise DamagedError(f"{RECORD} lacks {error}") from error
        self._refuse_another(artifact.origin_differences(made, self.origin), plan)
        if position.best_step is not None:
            check(self._best(position.best_step))
        if self._metrics_bytes() < position.metrics_bytes:
            raise DamagedError(f"{METRICS} is shorter than it was")
        return position, tensors(folder), self._upgrades(made)

    def _refuse_another(self, changed: list[str], plan: str) -> None:
        if plan != self.plan and not changed:
            changed = ["the tokenized training rows"]
        if changed:
            raise PippinError(
                f"the unfinished training in {self.folder} has other settings: "
                + "; ".join(changed),
                f"--redo {self.origin.stage} starts anew; put the settings back to go on with it",
            )

    def _upgrades(self, made: dict[str, Any]) -> list[str]:
        then, now = made["versions"], self.origin.versions
        names = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
        changes = (f"{name} {then.get(name)} -> {now.get(name)}" for name in names)
        note = "the checkpoint is from other versions, so bits may differ: "
        return [note + ", ".join(changes)] if names else []

    def _metrics_bytes(self) -> int:
        return self.metrics.stat().st_size if self.metrics.exists() else 0

    def _step(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def _best(self, step: int) -> Path:
        return self.folder / f"best-{step:06d}"

    def _steps(self) -> list[Path]:
        return sorted(self.folder.glob("step-[0-9]*"), key=_number)

    def _recover(self) -> None:
        """Clear what a kill left of a checkpoint being written, replaced or dropped."""
        for hidden in self.folder.glob(".*-*.*"):
            disk.recover(self.folder / hidden.name.split(".")[1])

    def _prune(self, step: int) -> None:
        """A damaged checkpoint after `step` is no reason to drop a good one before it."""
        done = [folder for folder in self._steps() if _number(folder) <= step]
        for folder in done[: -max(1, self.keep)]:
            disk.retire(folder)
        self._prune_best({_best_step(folder) for folder in self._steps()})

    def _prune_best(self, needed: set[int | None]) -> None:
        kept = {self._best(step) for step in needed if step is not None}
        for folder in set(self.folder.glob("best-*")) - kept:
            disk.retire(folder)


def _number(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def _position(record: dict[str, Any]) -> Position:
    values: dict[str, Any] = {**record}
    values["recent"] = tuple(record["recent"])
    return Position(**values)


def _best_step(folder: Path) -> int | None:
    try:
        return json.loads((folder / RECORD).read_text())["position"]["best_step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
