"""N + N updates are 2N, bit for bit, with the real engine: after Ctrl-C, and after kill -9.

Run as a script it is the process that forks, kills and resumes trainings: imports are paid once.
"""

import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pippin.artifact import Origin
from pippin.errors import Interrupted
from pippin.events import Event, Progress
from pippin.job import Job
from pippin.recipe import Data, Lora, Model, Recipe, Train
from pippin.stages.train import train

KILLS = 20
STEPS = 24  # the 22 rows make about 5 updates an epoch: several epochs are crossed

pytestmark = [pytest.mark.torch]


def make_rows(folder: Path) -> None:
    """Questions of different lengths, in two files."""
    for split, count in {"train": 22, "valid": 6}.items():
        words = [" ".join(f"{i * k}" for k in range(1, 3 + i % 7)) for i in range(count)]
        rows = [{"prompt": f"{word} =", "completion": f" {len(word)}"} for word in words]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model and the rows."""
    from tests.tiny_runs import write_speaking_model  # the killed child runs this file as a script

    folder = tmp_path_factory.mktemp("ground")
    write_speaking_model(folder / "model", hidden_size=32)
    make_rows(folder)
    return folder


def make_job(ground: Path, out: str, **settings: Any) -> Job:
    options: dict[str, Any] = {
        "steps": STEPS,
        "row_tokens": 96,
        "batch_rows": 1,
        "accumulate": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 3,
        "valid_every": 5,
        "checkpoint_every": 2,
        **settings,
    }
    recipe = Recipe(
        model=Model(source="tiny", device="cpu", dtype="float32"),
        data=Data(source=str(ground), chat_template=False, max_seq_len=96),
        lora=Lora(rank=4, dropout=0.1),
        train=Train(**options),
        seed=3,
        folder=ground,
    )
    origin = Origin(
        stage="train", inputs={"model": "m"}, settings=options, versions={"pippin": "0"}
    )
    return Job(
        stage="train",
        recipe=recipe,
        inputs={"model": ground / "model"},
        folder=ground / out / "train",
        origin=origin,
    )


def result(job: Job) -> tuple[bytes, list[float]]:
    """The trained bytes and all losses."""
    names = ("adapter_model.safetensors", "model.safetensors")
    weights = next(job.folder / name for name in names if (job.folder / name).exists())
    lines = map(json.loads, (job.folder / "metrics.jsonl").read_text().splitlines())
    return weights.read_bytes(), [line.get("loss", line.get("valid_loss")) for line in lines]


def press_at(events: Iterator[Event], step: int) -> None:
    """Press Ctrl-C when update `step` is done."""
    for event in events:
        if isinstance(event, Progress) and event.done == step:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for one another on a busy machine cost more than these matrices."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "settings",
    [
        {"steps": 14},
        {"steps": 14, "packing": False, "batch_rows": 2, "accumulate": 3},
        {"steps": 14, "method": "full", "learning_rate": 1e-3},
        {"steps": 14, "gradient_checkpointing": True},
    ],
    ids=["packed", "unpacked", "full", "checkpointing"],
)
def test_n_and_n_updates_are_2n(ground: Path, settings: dict[str, Any]) -> None:
    name = "-".join(map(str, settings.values()))
    whole = make_job(ground, f"whole-{name}", **settings)
    list(train(whole))
    parts = make_job(ground, f"parts-{name}", **settings)
    with pytest.raises(Interrupted, match="after update 7 of 14"):
        press_at(train(parts), 7)
    list(train(parts))
    assert result(parts) == result(whole)
    losses = result(whole)[1]
    assert losses[-1] < losses[0], "something is learned"


def test_another_seed_gives_other_bytes(ground: Path) -> None:
    """The tests above can fail."""
    one, two = make_job(ground, "one", steps=3), make_job(ground, "two", steps=3)
    list(train(one))
    list(train(replace(two, recipe=replace(two.recipe, seed=4))))
    assert result(one)[0] != result(two)[0]


def test_kills_at_random_moments_change_no_bit(ground: Path) -> None:
    script = subprocess.run(
        [sys.executable, __file__, str(ground)], capture_output=True, text=True, check=False
    )
    assert script.returncode == 0, script.stderr
    told = json.loads(script.stdout.splitlines()[-1])
    assert told["kills"] >= KILLS
    assert told["finished"] >= 2
    whole = result(make_job(ground, "whole"))
    for number in range(told["finished"]):
        job = make_job(ground, f"killed-{number}")
        assert result(job) == whole
        assert [path.name for path in job.folder.parent.iterdir()] == ["train"]


RECIPE = """
seed = 3
[model]
source = "model"
device = "cpu"
dtype = "float32"
[data]
source = "."
chat_template = false
max_seq_len = 96
[lora]
rank = 4
dropout = 0.1
[train]
steps = 200
row_tokens = 96
valid_every = 100
[deploy]
targets = []
"""


def test_ctrl_c_on_the_command_line(ground: Path) -> None:
    """The process group gets it, as from a terminal; the same command goes on."""
    (ground / "long.toml").write_text(RECIPE)
    command = [sys.executable, "-m", "pippin", "train", "long.toml", "--set", "out=line"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = subprocess.Popen(
        command, cwd=ground, env=environment, stderr=subprocess.PIPE, text=True, process_group=0
    )
    record = ground / "line" / ".train.work" / "metrics.jsonl"
    while started.poll() is None and not (record.exists() and record.stat().st_size > 4000):
        time.sleep(0.02)
    os.killpg(started.pid, signal.SIGINT)
    said = started.communicate()[1]
    assert started.returncode == 130, said
    assert "error: stopped after update" in said
    assert "hint: run the same command again" in said
    assert "Traceback" not in said
    resumed = subprocess.run(
        command, cwd=ground, env=environment, capture_output=True, text=True, check=True
    )
    assert "going on after update" in resumed.stderr
    assert (ground / "line" / "train" / "adapter_model.safetensors").exists()


def fork_training(job: Job) -> tuple[int, int]:
    """A child that trains, and a pipe that says when its loop has begun."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for event in train(job):
                if isinstance(event, Progress):
                    os.write(writing, b".")
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    return child, reading


def kill_after(child: int, reading: int, seconds: float) -> bool:
    """Whether the child was killed, `seconds` after its loop began; False when it was done."""
    os.read(reading, 1)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.close(reading)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    return status != 0


def main(ground: Path) -> None:
    import torch

    importlib.import_module("transformers.models.llama.modeling_llama")
    torch.set_num_threads(1)  # a fork cannot use the threads of its parent
    child, reading = fork_training(make_job(ground, "whole"))
    os.read(reading, 1)
    start = time.monotonic()
    assert os.waitpid(child, 0)[1] == 0
    duration = time.monotonic() - start
    os.close(reading)
    draw, kills, finished = random.Random(0), 0, 0
    while kills < KILLS or finished < 2:
        # The longest delays end in the writing of the result, or after it.
        delay = draw.uniform(0, duration * draw.choice((0.1, 0.5, 1.1)))
        if kill_after(*fork_training(make_job(ground, f"killed-{finished}")), delay):
            kills += 1
        else:
            finished += 1
    print(json.dumps({"kills": kills, "finished": finished, "seconds": duration}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
