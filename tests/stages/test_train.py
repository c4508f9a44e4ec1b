"""The training loop over an engine that learns a histogram: resume, faults, validation, disks."""

import contextlib
import json
import math
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pippin import artifact
from pippin.artifact import Origin
from pippin.data.batches import Batch, Sample
from pippin.engines import StepResult, Weights
from pippin.errors import DataError, Interrupted, PippinError
from pippin.events import Event, Finished, Metric, Notice, Progress, Started
from pippin.job import Job
from pippin.recipe import Data, Model, Recipe, Train
from pippin.stages import preparing
from pippin.stages import train as stage
from pippin.stages.train import train

VOCAB = 8


@dataclass
class Script:
    """What the fake does beyond learning: losses it reports, by update, and what it does then."""

    losses: dict[int, float] = field(default_factory=dict)
    valid: list[float] = field(default_factory=list)
    interrupt_at: int | None = None
    signals: int = 1
    weight_size: int = 0
    shares: bool = False


class Histogram:
    """A Trainer that fits logits to the tokens' frequencies, with momentum and noisy gradients."""

    def __init__(self, script: Script, seed: int) -> None:
        self.script, self.seed = script, seed
        self.notices = ("attention is computed the slow way",)
        self.shares = script.shares
        self.logits = np.zeros(VOCAB)
        self.momentum = np.zeros(VOCAB)
        self.ballast = np.zeros(script.weight_size, np.uint8)
        self.steps = 0

    def step(
        self,
        batches: Sequence[Batch],
        learning_rate: float,
        upcoming: Callable[[], Sequence[Batch]] = tuple,
    ) -> StepResult:
        if self.steps + 1 == self.script.interrupt_at:
            for _ in range(self.script.signals):
                os.kill(os.getpid(), signal.SIGINT)
        counts = sum((_counts(batch) for batch in batches), np.zeros(VOCAB))
        tokens = int(counts.sum())
        loss = self.script.losses.get(self.steps + 1, -counts @ self._logprobs() / tokens)
        noise = np.random.default_rng((self.seed, self.steps)).normal(size=VOCAB)
        gradient = np.exp(self._logprobs()) - counts / tokens + 0.01 * noise
        if math.isfinite(loss):
            self.momentum = 0.9 * self.momentum + gradient
            self.logits = self.logits - learning_rate * self.momentum
            self.steps += 1
        return StepResult(loss_sum=loss * tokens, tokens=tokens, grad_norm=1.0)

    def loss(self, batch: Batch) -> tuple[float, int]:
        counts = _counts(batch)
        if self.script.valid:
            return self.script.valid.pop(0) * counts.sum(), int(counts.sum())
        return float(-counts @ self._logprobs()), int(counts.sum())

    def weights(self) -> Weights:
        return {"logits": self.logits.astype(np.float32)}

    def state(self) -> Weights:
        return {
            "logits": self.logits.copy(),
            "momentum": self.momentum.copy(),
            "steps": np.array(self.steps),
            "ballast": self.ballast,
        }

    def restore(self, state: Weights) -> None:
        self.logits, self.momentum = state["logits"], state["momentum"]
        self.steps = int(state["steps"])

    def _logprobs(self) -> np.ndarray:
        return self.logits - np.log(np.exp(self.logits).sum())


def _counts(batch: Batch) -> np.ndarray:
    return np.bincount(batch.tokens_BT[batch.scored_BT], minlength=VOCAB).astype(float)


@dataclass
class Fakes:
    """The engine and the data of these tests; `script` may be changed between runs."""

    script: Script = field(default_factory=Script)
    valid_rows: int = 4

    def open_engine(self, model: Any) -> Any:
        loaded = SimpleNamespace(trainer=lambda *args: Histogram(self.script, args[-1]))
        return SimpleNamespace(
            load=lambda checkpoint, dtype: loaded,
            device=lambda: "cpu (2 cores)",
            dtype=lambda name: "float32",
            peak_memory=lambda: 1234,
        )

    def load_split(self, data: Data, folder: Path, split: str) -> list[Any]:
        count = {"train": 22, "valid": self.valid_rows}[split]
        return [SimpleNamespace(where=f"{split}.jsonl:{i + 1}") for i in range(count)]


def tokenize(rows: Sequence[Any], tokenizer: object, data: Data) -> Any:
    samples = []
    for row in range(len(rows)):
        rng = np.random.default_rng(row)
        tokens = np.minimum(rng.poisson(2, size=rng.integers(3, 9)), VOCAB - 1).astype(np.int32)
        samples.append(Sample(tokens=tokens, scored=np.arange(len(tokens)) > 0, row=row))
    return SimpleNamespace(samples=samples, notices=["1 row cut"] if rows else [])


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    made = Fakes()
    monkeypatch.setattr(preparing, "load_tokenizer", lambda folder: None)
    monkeypatch.setattr(preparing, "context_of", lambda inputs: 64)
    splits = {"train": "train", "valid": "taken from train", "test": "taken from train"}
    monkeypatch.setattr(preparing, "find_splits", lambda data, folder: splits)
    monkeypatch.setattr(preparing, "load_split", made.load_split)
    monkeypatch.setattr(preparing, "tokenize", tokenize)
    monkeypatch.setattr(stage, "open_engine", made.open_engine)
    monkeypatch.setattr(stage, "first_weights", lambda job: {})
    monkeypatch.setattr(stage, "write_outcome", write_outcome)
    return made


def write_outcome(folder: Path, job: Job, weights: Weights) -> None:
    (folder / "logits").write_bytes(weights["logits"].tobytes())


def make_job(out: Path, **settings: Any) -> Job:
    options: dict[str, Any] = {
        "steps": 12,
        "row_tokens": 16,
        "batch_rows": 2,
        "accumulate": 2,
        "learning_rate": 0.1,
        "valid_every": 4,
        "checkpoint_every": 3,
        **settings,
    }
    recipe = Recipe(
        model=Model(source="tiny"), data=Data(source="data"), train=Train(**options), seed=5
    )
    harmless = ("checkpoint_every", "spike", "keep_checkpoints")
    origin = Origin(
        stage="train",
        inputs={"model": "m1"},
        settings={k: v for k, v in options.items() if k not in harmless},
        versions={"pippin": "0.1.0"},
    )
    return Job(
        stage="train",
        recipe=recipe,
        inputs={"model": out / "model"},
        folder=out / "train",
        origin=origin,
    )


def trained(job: Job) -> tuple[bytes, list[dict[str, float]]]:
    """The weights and the record without what the clock and the machine say."""
    lines = map(json.loads, (job.folder / "metrics.jsonl").read_text().splitlines())
    kept = ("step", "loss", "learning_rate", "valid_loss")
    record = [{k: line[k] for k in kept if k in line} for line in lines]
    return (job.folder / "logits").read_bytes(), record


def texts(events: Sequence[Event]) -> str:
    return "\n".join(event.text for event in events if isinstance(event, Notice))


def work_names(job: Job) -> list[str]:
    work = job.folder.with_name(".train.work")
    return sorted(path.name for path in work.iterdir())


def test_shared_beginnings_are_told_where_they_are_used(
    tmp_path: Path, fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "shared_share", lambda plan: 0.22)
    for name, shares in (("with", True), ("without", False)):
        fakes.script.shares = shares
        job = make_job(tmp_path / name)
        said = texts(list(train(job)))
        assert ("22% of the tokens are beginnings that samples share" in said) == shares
        assert artifact.read_manifest(job.folder)["scores"]["shared"] == 0.22 * shares


def test_what_a_training_yields_and_leaves(tmp_path: Path, fakes: Fakes) -> None:
    job = make_job(tmp_path)
    events = list(train(job))
    assert events[0] == Started(
        stage="train", title="train a rank 16 adapter", total=12, unit="steps"
    )
    finished = events[-1]
    assert isinstance(finished, Finished)
    done = [event.done for event in events if isinstance(event, Progress)]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, 12)
    metrics = [event for event in events if isinstance(event, Metric)]
    assert [metric.step for metric in metrics if "valid_loss" in metric.values] == [4, 8, 12]
    steps = [metric for metric in metrics if "loss" in metric.values]
    assert [metric.step for metric in steps] == list(range(1, 13))
    assert all(metric.values["memory_bytes"] > 1e6 for metric in steps)
    lines = (job.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": m.step, **m.values} for m in metrics]
    manifest = artifact.read_manifest(job.folder)
    assert manifest is not None
    assert manifest["scores"] == finished.summary
    assert finished.summary["steps"] == 12
    assert finished.summary["peak_memory_bytes"] == 1234
    assert [path.name for path in tmp_path.iterdir()] == ["train"], "the working folder is gone"


def test_every_derived_default_is_said(tmp_path: Path, fakes: Fakes) -> None:
    said = texts(list(train(make_job(tmp_path))))
    assert "1 row cut" in said
    assert "validation: 1 row cut" in said
    assert "torch on cpu (2 cores), float32" in said
    assert "rows of 16 tokens" in said
    assert "the longest of 22 samples has 8" in said
    assert "64 tokens an update" in said
    assert "attention is computed the slow way" in said
    assert "warm-up" not in said
    assert "warm-up of 20 updates is not over" in texts(
        list(train(make_job(tmp_path / "2", warmup_steps=20)))
    )


@pytest.mark.parametrize("every", [1, 3, 0])
@pytest.mark.parametrize("stop", [1, 4, 7, 12])
def test_n_and_n_updates_are_2n(tmp_path: Path, fakes: Fakes, stop: int, every: int) -> None:
    whole = make_job(tmp_path / "whole")
    list(train(whole))
    job = make_job(tmp_path / "parts", checkpoint_every=every)
    fakes.script.interrupt_at = stop
    with pytest.raises(Interrupted, match=f"stopped after update {stop} of 12") as caught:
        list(train(job))
    assert caught.value.exit_code == 130
    assert not job.folder.exists()
    fakes.script.interrupt_at = None
    events = list(train(job))
    assert f"going on after update {stop}" in texts(events)
    assert trained(job) == trained(whole)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_scarce_memory_ends_it_with_its_work_saved(
    tmp_path: Path, fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, job = make_job(tmp_path / "whole"), make_job(tmp_path / "half")
    list(train(whole))
    free = iter([2**34] * 4 + [2**27])
    with monkeypatch.context() as patch:
        patch.setattr("pippin.stages.guard.memory", lambda: (2**34, next(free)))
        with pytest.raises(PippinError) as caught:
            list(train(job))
    assert caught.value.message.startswith("stopped after update 5 of 12, a checkpoint is written")
    assert "134 MB of memory are left, 0.8% of all" in caught.value.message
    list(train(job))
    assert trained(job) == trained(whole)


def test_a_second_ctrl_c_at_once_is_the_same_one(tmp_path: Path, fakes: Fakes) -> None:
    fakes.script = Script(interrupt_at=4, signals=2)
    with pytest.raises(Interrupted, match="after update 4"):
        list(train(make_job(tmp_path)))


def test_a_second_ctrl_c_later_destroys_nothing(
    tmp_path: Path, fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pippin.stages.interrupts.GRACE", 0.0)
    whole, job = make_job(tmp_path / "whole"), make_job(tmp_path / "parts")
    list(train(whole))
    fakes.script = Script(interrupt_at=8, signals=2)
    with pytest.raises(Interrupted, match="stopped at once"):
        list(train(job))
    fakes.script = Script()
    assert "going on after update 6" in texts(list(train(job)))
    assert trained(job) == trained(whole)


@pytest.mark.parametrize("consumed", [0, 1, 5, 20, 40])
def test_a_consumer_that_goes_away_loses_little(
    tmp_path: Path, fakes: Fakes, consumed: int
) -> None:
    whole, job = make_job(tmp_path / "whole"), make_job(tmp_path / "parts")
    list(train(whole))
    events = train(job)
    with contextlib.suppress(StopIteration):
        for _ in range(consumed):
            next(events)
    events.close()  # ty: ignore[missing-attribute]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    list(train(job))
    assert trained(job) == trained(whole)


def test_a_damaged_checkpoint_costs_updates_not_results(tmp_path: Path, fakes: Fakes) -> None:
    whole, job = make_job(tmp_path / "whole"), make_job(tmp_path / "parts")
    list(train(whole))
    fakes.script.interrupt_at = 8
    with pytest.raises(Interrupted):
        list(train(job))
    fakes.script.interrupt_at = None
    os.truncate(tmp_path / "parts" / ".train.work" / "step-000008" / "state.safetensors", 50)
    said = texts(list(train(job)))
    assert "checkpoint step-000008 is damaged" in said
    assert "going on after update 6" in said
    assert trained(job) == trained(whole)


@pytest.mark.parametrize("loss", [math.nan, math.inf, 1000.0])
def test_a_bad_loss_stops_and_says_where(tmp_path: Path, fakes: Fakes, loss: float) -> None:
    whole, job = make_job(tmp_path / "whole", steps=15), make_job(tmp_path / "parts", steps=15)
    list(train(whole))
    fakes.script.losses = {14: loss}
    with pytest.raises(PippinError, match="update 14: the loss is") as caught:
        list(train(job))
    rows = caught.value.message.partition("its rows: ")[2]
    assert rows.startswith("train.jsonl:")
    assert "step-000012" in caught.value.hint
    assert "--redo train" in caught.value.hint
    assert work_names(job)[-2:] == ["step-000009", "step-000012"]
    fakes.script.losses = {}
    list(train(job))
    assert trained(job) == trained(whole)


def test_the_rows_it_names_are_those_of_the_batch(tmp_path: Path, fakes: Fakes) -> None:
    job = make_job(tmp_path, packing=False, batch_rows=1, accumulate=1)
    material = preparing.prepare(job)
    tokens = material.plan.batches(2)[0].tokens_BT[0]
    rows = [
        s.row for s in material.samples if s.tokens.tolist() == tokens[: len(s.tokens)].tolist()
    ]
    fakes.script.losses = {3: math.nan}
    with pytest.raises(PippinError, match=rf"train\.jsonl:{rows[0] + 1}$"):
        list(train(job))


def test_a_spike_may_be_allowed_after_the_fact(tmp_path: Path, fakes: Fakes) -> None:
    fakes.script.losses = {12: 1000.0}
    with pytest.raises(PippinError, match="times the recent median"):
        list(train(make_job(tmp_path)))
    list(train(make_job(tmp_path, spike=0.0)))
    assert (tmp_path / "train" / "logits").exists()


def test_the_best_weights_are_kept(tmp_path: Path, fakes: Fakes) -> None:
    fakes.script.valid = [3.0, 1.0, 2.0]
    short, job = make_job(tmp_path / "short"), make_job(tmp_path / "long")
    events = list(train(job))
    assert "the weights after update 8 are kept" in texts(events)
    assert isinstance(events[-1], Finished)
    assert events[-1].summary["valid_loss"] == 1.0
    assert events[-1].summary["best_step"] == 8
    fakes.script = Script(valid=[3.0, 1.0], interrupt_at=8)
    with pytest.raises(Interrupted):
        list(train(short))
    best = short.folder.with_name(".train.work") / "best-000008" / "state.safetensors"
    assert (job.folder / "logits").read_bytes() == best.read_bytes()[-4 * VOCAB :]


def test_patience_ends_early_also_across_a_resume(tmp_path: Path, fakes: Fakes) -> None:
    settings = {"steps": 40, "valid_every": 2, "patience": 3}
    fakes.script.valid = [1.0, 2.0, 2.0, 2.0]
    whole = make_job(tmp_path / "whole", **settings)
    assert "no better validation loss in 3 validations" in texts(list(train(whole)))
    job = make_job(tmp_path / "parts", **settings)
    fakes.script = Script(valid=[1.0, 2.0], interrupt_at=5)
    with pytest.raises(Interrupted):
        list(train(job))
    fakes.script = Script(valid=[2.0, 2.0])
    list(train(job))
    assert trained(job) == trained(whole)
    assert trained(job)[1][-1] == {"step": 8, "valid_loss": 2.0}


def test_without_a_cadence_it_validates_once(tmp_path: Path, fakes: Fakes) -> None:
    metrics = [e for e in train(make_job(tmp_path, valid_every=0)) if isinstance(e, Metric)]
    assert [m.step for m in metrics if "valid_loss" in m.values] == [12]


def test_validation_scores_every_row_once(tmp_path: Path, fakes: Fakes) -> None:
    fakes.valid_rows = 9
    events = list(train(make_job(tmp_path, steps=1, learning_rate=0.0, valid_rows=7)))
    losses = [
        e.values["valid_loss"] for e in events if isinstance(e, Metric) and len(e.values) == 1
    ]
    assert losses == [pytest.approx(math.log(VOCAB))]
    material = preparing.prepare(make_job(tmp_path, valid_rows=7))
    wanted = sum(len(s.tokens) - 1 for s in tokenize(range(7), None, Data(source="")).samples)
    assert sum(batch.scored_tokens for batch in material.valid) == wanted


def test_without_validation_rows_the_last_weights_are_kept(tmp_path: Path, fakes: Fakes) -> None:
    fakes.valid_rows = 0
    events = list(train(make_job(tmp_path)))
    assert "no validation rows" in texts(events)
    assert isinstance(events[-1], Finished)
    assert events[-1].summary["valid_loss"] is None


def test_a_validation_loss_that_is_not_finite_stops(tmp_path: Path, fakes: Fakes) -> None:
    fakes.script.valid = [math.nan]
    with pytest.raises(PippinError, match="the validation loss is nan"):
        list(train(make_job(tmp_path)))


def test_nothing_is_trained_for_a_folder_that_is_not_ours(tmp_path: Path, fakes: Fakes) -> None:
    job = make_job(tmp_path)
    job.folder.mkdir()
    (job.folder / "thesis.txt").write_text("mine")
    with pytest.raises(PippinError, match="was not made by pippin"):
        next(train(job))


def test_other_settings_are_refused(tmp_path: Path, fakes: Fakes) -> None:
    fakes.script.interrupt_at = 4
    with pytest.raises(Interrupted):
        list(train(make_job(tmp_path)))
    with pytest.raises(PippinError, match=r"learning_rate 0\.1 -> 0\.2"):
        list(train(make_job(tmp_path, learning_rate=0.2)))


def test_other_rows_are_refused(
    tmp_path: Path, fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes.script.interrupt_at = 4
    job = make_job(tmp_path)
    with pytest.raises(Interrupted):
        list(train(job))
    monkeypatch.setattr(preparing, "tokenize", lambda rows, *rest: tokenize(rows[1:], *rest))
    with pytest.raises(PippinError, match="the tokenized training rows"):
        list(train(job))


SMALL_DISK = "1m"


def fill_after(events: Iterator[Event], step: int, ballast: Path) -> None:
    for event in events:
        if isinstance(event, Progress) and event.done == step and not ballast.exists():
            ballast.write_bytes(b"0" * 450_000)


def test_a_disk_that_fills_up_keeps_the_last_checkpoint(small_disk: Path, fakes: Fakes) -> None:
    whole, job = make_job(small_disk.parent / "whole"), make_job(small_disk)
    fakes.script = Script(weight_size=200_000)
    list(train(whole))
    ballast = small_disk / "ballast"
    with pytest.raises(PippinError, match="is full") as caught:
        fill_after(train(job), 7, ballast)
    assert "nothing finished was lost" in caught.value.hint
    assert [name for name in work_names(job) if "step" in name] == ["step-000003", "step-000006"]
    ballast.unlink()
    assert "going on after update 6" in texts(list(train(job)))
    assert trained(job) == trained(whole)


def test_samples_longer_than_the_models_positions_are_refused(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "context_of", lambda inputs: 4)
    with pytest.raises(DataError, match="longer than the model's 4 positions"):
        list(stage.train(make_job(tmp_path)))
