"""Checkpoints are whole or not at all, belong to one training, and never cost a good one."""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from pippin import disk
from pippin.artifact import Origin
from pippin.engines import Weights
from pippin.errors import PippinError
from pippin.stages import checkpoints
from pippin.stages.checkpoints import Position, Store

ORIGIN = Origin(
    stage="train",
    inputs={"model": "m1", "data": "d1"},
    settings={"train.learning_rate": 2e-4, "lora.rank": 8},
    versions={"torch": "2.13"},
)


def make_store(folder: Path, **settings: Any) -> Store:
    options: dict[str, Any] = {"origin": ORIGIN, "plan": "p1", "keep": 2, **settings}
    return Store(folder=folder / ".train.work", **options)


def make_state(step: int, size: int = 5) -> Weights:
    rng = np.random.default_rng(step)
    return {
        "weights.a": rng.normal(size=(3, size)).astype(np.float32),
        "half": rng.normal(size=4).astype(ml_dtypes.bfloat16),
        "steps": np.array([step], np.int64),
        "random": rng.integers(0, 255, 7, dtype=np.uint8),
        "scalar": np.array(step, np.float64),
    }


def equal(one: Weights | None, two: Weights) -> bool:
    return (
        one is not None
        and one.keys() == two.keys()
        and all(one[k].dtype == two[k].dtype for k in one)
        and all(one[k].tobytes() == two[k].tobytes() for k in one)
    )


def save(store: Store, *steps: int, **values: Any) -> None:
    for step in steps:
        length = store.append({"step": step, "loss": 1.0})
        store.save(Position(step=step, metrics_bytes=length, **values), make_state(step))


def names(store: Store) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


def lines(store: Store) -> list[int]:
    return [json.loads(line)["step"] for line in store.metrics.read_text().splitlines()]


def test_nothing_to_go_on_from(tmp_path: Path) -> None:
    found = make_store(tmp_path).latest()
    assert (found.position, found.state, found.notices) == (Position(), None, ())


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.latest()
    position = Position(
        step=7, tokens=900, seconds=0.1, worse=1, recent=(0.1, 1 / 3), metrics_bytes=0
    )
    folder = store.save(position, make_state(7))
    found = store.latest()
    assert found.position == position
    assert equal(found.state, make_state(7))
    state = {k: v for k, v in make_state(7).items() if k != "half"}
    theirs = load_file(folder / "state.safetensors")
    assert equal({k: theirs[k] for k in state}, state), "safetensors itself reads it"


def test_the_last_ones_and_the_best_are_kept(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.latest()
    store.save_best(10, make_state(10))
    save(store, 10, 20, 30, best_step=10, best_loss=1.0)
    assert names(store) == ["best-000010", "metrics.jsonl", "step-000020", "step-000030"]
    store.save_best(40, make_state(40))
    save(store, 40, best_step=40, best_loss=0.9)
    kept = ["best-000010", "best-000040", "metrics.jsonl", "step-000030", "step-000040"]
    assert names(store) == kept, "the checkpoint before still needs the best before"
    save(store, 50, best_step=40, best_loss=0.9)
    assert names(store) == ["best-000040", "metrics.jsonl", "step-000040", "step-000050"]
    assert equal(store.best(40), make_state(40))


def test_without_checkpoints_one_best_is_kept(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.latest()
    store.save_best(10, make_state(10))
    store.save_best(20, make_state(20))
    assert names(store) == ["best-000020", "metrics.jsonl"]


def test_the_record_is_cut_to_the_checkpoint(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.latest()
    save(store, 1, 2)
    store.append({"step": 3, "loss": 1.0})
    with store.metrics.open("a") as file:
        file.write('{"step": 4, "lo')
    assert store.latest().position.step == 2
    assert lines(store) == [1, 2]


def damage(folder: Path, how: str) -> None:
    state, progress = folder / "state.safetensors", folder / "progress.json"
    if how == "cut":
        os.truncate(state, state.stat().st_size - 1)
    elif how == "flipped":
        data = bytearray(state.read_bytes())
        data[-1] ^= 1
        state.write_bytes(data)
    elif how == "missing":
        state.unlink()
    elif how == "broken":
        progress.write_text(progress.read_text()[:40])
    elif how == "strange":
        progress.write_text("[]")
    else:
        progress.unlink()


@pytest.mark.parametrize("how", ["cut", "flipped", "missing", "broken", "strange", "unlinked"])
def test_a_damaged_newest_falls_back_to_the_one_before(tmp_path: Path, how: str) -> None:
    store = make_store(tmp_path)
    store.latest()
    save(store, 1, 2)
    damage(store.folder / "step-000002", how)
    found = store.latest()
    assert found.position.step == 1
    assert equal(found.state, make_state(1))
    assert [notice.split(" (")[0] for notice in found.notices] == [
        "checkpoint step-000002 is damaged"
    ]
    assert lines(store) == [1]
    save(store, 2)
    assert store.latest().position.step == 2


def test_damage_everywhere_starts_anew_and_says_so(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.latest()
    save(store, 1, 2)
    damage(store.folder / "step-000001", "cut")
    damage(store.folder / "step-000002", "cut")
    found = store.latest()
    assert (found.position, found.state, len(found.notices)) == (Position(), None, 2)


def test_a_damaged_newer_one_does_not_push_out_a_good_one(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep=1)
    store.latest()
    save(store, 30)
    damage(store.folder / "step-000030", "cut")
    store.latest()
    save(store, 20)
    assert store.latest().position.step == 20


def test_a_checkpoint_without_its_best_weights_is_damaged(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.latest()
    save(store, 1)
    store.save_best(2, make_state(2))
    save(store, 2, best_step=2, best_loss=1.0)
    damage(store.folder / "best-000002", "flipped")
    assert store.latest().position.step == 1


def test_another_trainings_checkpoint_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.latest()
    save(store, 1)
    before = names(store)
    settings = replace(ORIGIN, settings={"train.learning_rate": 1e-4, "lora.rank": 8})
    for other, what in [
        ({"origin": settings}, "train.learning_rate 0.0002 -> 0.0001"),
        ({"origin": replace(ORIGIN, inputs={"model": "m2", "data": "d1"})}, "input model"),
        ({"plan": "p2"}, "the tokenized training rows"),
    ]:
        with pytest.raises(PippinError, match=what) as caught:
            make_store(tmp_path, **other).latest()
        assert "--redo train starts anew" in caught.value.hint
        assert names(store) == before
    checkpoints.forget(tmp_path / "train")
    assert list(tmp_path.iterdir()) == []
    assert make_store(tmp_path, origin=settings).latest().position.step == 0


def test_an_upgrade_in_between_is_said(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.latest()
    save(store, 1)
    found = make_store(tmp_path, origin=replace(ORIGIN, versions={"torch": "2.14"})).latest()
    assert found.position.step == 1
    assert found.notices == (
        "the checkpoint is from other versions, so bits may differ: torch 2.13 -> 2.14",
    )


def killed_save(store: Store, call: int) -> int:
    """Save step 3 in a fork that is killed at its n-th access to the file system."""
    child = os.fork()
    if child == 0:
        count = 0

        def hook(event: str, args: tuple[object, ...]) -> None:
            nonlocal count
            if event.startswith(("os.", "shutil.", "open", "fcntl.")):
                count += 1
                if count == call:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        store.save_best(3, make_state(3))
        save(store, 3, best_step=3, best_loss=0.5)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_kill_at_any_moment_leaves_a_checkpoint_that_works(tmp_path: Path) -> None:
    seen = set()
    for call in range(1, 400):
        store = make_store(tmp_path / str(call), keep=1)
        store.folder.parent.mkdir()
        store.latest()
        store.save_best(2, make_state(2))
        save(store, 2, best_step=2, best_loss=0.6)
        status = killed_save(store, call)
        found = store.latest()
        step = found.position.step
        seen.add(step)
        assert found.notices == ()
        assert equal(found.state, make_state(step))
        assert equal(store.best(step), make_state(step))
        assert lines(store) == [2, 3][: step - 1]
        assert not [name for name in names(store) if name.startswith(".")]
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert status == 0
    assert call > 30, "the child must be killed at many points before it gets through"
    assert seen == {2, 3}


SMALL_DISK = "512k"


def test_a_full_disk_keeps_the_checkpoint_before(small_disk: Path) -> None:
    store = make_store(small_disk)
    with disk.disk_errors(store.folder):
        store.latest()
        save(store, 1)
    with pytest.raises(PippinError, match="is full"):
        store.save(Position(step=2), make_state(2, size=60_000))
    found = store.latest()
    assert found.position.step == 1
    assert equal(found.state, make_state(1))
    assert names(store) == ["metrics.jsonl", "step-000001"]
