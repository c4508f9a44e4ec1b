"""The command line over a whole small recipe, and over everything that can be wrong with it."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.tiny_runs import RECIPE, write_rows, write_speaking_model

from pippin import cli
from pippin.console import printers
from pippin.events import Progress
from pippin.model import weights

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a recipe that was run once."""
    folder = tmp_path_factory.mktemp("made")
    write_speaking_model(folder / "model")
    write_rows(folder / "rows")
    (folder / "tiny.toml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["pippin", "run", "tiny.toml", "--quiet"])
        cli.main()
    return folder


@pytest.fixture
def place(made, tmp_path, monkeypatch):
    """A copy of recipe, model and data without the run; the current folder."""
    for name in ("model", "rows"):
        shutil.copytree(made / name, tmp_path / name)
    shutil.copy(made / "tiny.toml", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def fails(pippin):
    """Runs a command line that must fail in two lines; returns them."""

    def call(*arguments, code=1):
        got, _, err = pippin(*arguments)
        lines = [line for line in err.splitlines() if line.startswith(("error: ", "hint: "))]
        assert got == code, err
        assert len(lines) == 2, err
        assert lines[0].startswith("error: ")
        assert lines[1].startswith("hint: ")
        assert err.splitlines()[-2:] == lines, "the last two lines"
        assert "Traceback" not in err
        return lines

    return call


def test_run_makes_everything_and_shows_it(made, pippin, monkeypatch):
    monkeypatch.chdir(made)
    code, out, err = pippin("run", "tiny.toml")
    assert code == 0
    stages = ["base", "adapter", "merged", "quantized"]
    assert [
        line.split()[0]
        for line in out.splitlines()
        if line.split()[:1] and line.split()[0] in stages
    ][:4] == stages
    assert "report: runs/tiny/report.html" in out
    assert (made / "runs/tiny/report.html").exists()
    assert err.count("done before") == 7, "a second run has nothing to do"


def test_json_lines_are_json(made, pippin, monkeypatch):
    monkeypatch.chdir(made)
    _, out, err = pippin("run", "tiny.toml", "--json")
    objects = [json.loads(line) for line in out.splitlines()]
    assert [o["event"] for o in objects] == ["finished"] * 7 + ["results"]
    assert err == ""


def test_generate_answers_from_any_stage(made, pippin, monkeypatch):
    monkeypatch.chdir(made)
    for what in ("tiny.toml", "runs/tiny", "runs/tiny/merge", "model"):
        code, out, err = pippin("generate", what, "1 =", "--max-tokens", "3")
        assert code == 0, err
        assert out.endswith("\n")


def test_data_and_plan_and_report(made, pippin, monkeypatch):
    monkeypatch.chdir(made)
    code, out, _ = pippin("data", "tiny.toml", "--rows", "1")
    assert code == 0
    assert "[[" in out
    code, out, _ = pippin("plan", "tiny.toml")
    assert code == 0
    assert "torch on cpu" in out
    assert out.count("done before") == 7
    (made / "runs/tiny/report.html").unlink()
    assert pippin("report", "tiny.toml")[0] == 0
    assert (made / "runs/tiny/report.html").exists()


def test_a_missed_gate_stops_with_figures_and_keeps_the_table(made, pippin, monkeypatch):
    monkeypatch.chdir(made)
    code, out, err = pippin("run", "tiny.toml", "--set", "gates.adapter.min_exact_match=1")
    assert code == 1
    assert "error: adapter: exact match" in err
    assert "missed" in out


def test_version(pippin):
    code, out, _ = pippin("--version")
    assert (code, out.split()[0]) == (0, "pippin")
    assert "torch " in pippin("version")[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian", "tiny.toml"], "did you mean 'train'"),
        (["run"], "Missing argument 'RECIPE'"),
        (["run", "tiny.toml", "--fast"], "No such option"),
        (["run", "tiny.toml", "--redo", "trian"], "trian"),
        (["run", "nowhere.toml"], "no recipe at nowhere.toml"),
        (["run", "tiny.toml", "--set", "train.stepps=1"], "--set: train.stepps: unknown key"),
        (["run", "tiny.toml", "--set", "model.device=mps"], "mps"),
        (["run", "tiny.toml", "--set", "model.source="], "model.source: is empty"),
        (["run", "tiny.toml", "--set", "out=model/runs"], "lies in model, which would change"),
        (["generate", "model", "hi", "--max-tokens", "0"], "0 is not in the range"),
    ],
)
def test_command_that_cannot_be_understood(place, fails, arguments, words):
    assert words in fails(*arguments, code=2)[0]
    assert not (place / "runs").exists()


def test_an_option_without_its_value_has_the_help_of_its_command(place, fails):
    assert fails("run", "tiny.toml", "--set", code=2)[1] == "hint: see `pippin run --help`"


def test_a_model_that_begins_no_text_is_not_asked_with_nothing(place, fails):
    assert "the prompt has no tokens" in fails("generate", "model", "")[0]
    asked = ("--set", 'evaluate.prompts=["", "1 ="]')
    assert "1 prompt to be answered without a token" in fails("run", "tiny.toml", *asked)[0]


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_unknown_key_has_its_line(place, fails):
    edit(place / "tiny.toml", "learning_rate", "learnin_rate")
    error, hint = fails("run", "tiny.toml", code=2)
    assert error == "error: tiny.toml:16: train.learnin_rate: unknown key"
    assert hint == "hint: did you mean learning_rate?"


DATA = [
    ("missing", lambda path: path.unlink(), "rows"),
    ("empty", lambda path: path.write_text(""), "train.jsonl"),
    ("truncated", lambda path: path.write_bytes(path.read_bytes()[:-9]), "train.jsonl:12"),
    ("broken", lambda path: edit(path, '"3 ="', "3 ="), "train.jsonl:4"),
    ("nothing to train", lambda path: edit(path, '" 9"', '""'), "train.jsonl:4"),
    ("too long", lambda path: edit(path, '" 9"', f'"{"9" * 99}"'), "train.jsonl:4"),
    ("no known keys", lambda path: edit(path, "prompt", "frage"), "train.jsonl:1"),
]


@pytest.mark.parametrize(("breaking", "where"), [d[1:] for d in DATA], ids=[d[0] for d in DATA])
def test_data_that_cannot_be_used(place, fails, breaking, where):
    breaking(place / "rows" / "train.jsonl")
    for verb in ("data", "train"):
        error, _ = fails(verb, "tiny.toml")
        assert where in error
    assert not (place / "runs/tiny/train").exists()


def test_model_without_tokenizer(place, fails):
    for path in (place / "model").glob("tokenizer*"):
        path.unlink()
    assert "tokenizer" in fails("run", "tiny.toml")[0]


def test_truncated_weights(place, fails):
    weights = place / "model" / "model.safetensors"
    size = weights.stat().st_size
    os.truncate(weights, size - 100)
    error, _ = fails("run", "tiny.toml")
    assert "model.safetensors" in error
    assert f"{size - 100:,}" in error or str(size - 100) in error


def test_adapter_of_another_base(made, place, fails):
    config = json.loads((place / "model/config.json").read_text())
    assert config["hidden_size"] == 64
    shutil.copytree(made / "runs/tiny/train", place / "adapter")
    write_other(place / "other")
    error, _ = fails("generate", "adapter", "1 =", "--base", "other")
    assert "the adapter was trained on model with digest" in error


def test_an_adapter_of_pefts_is_merged_and_measured(made, place, pippin):
    """PEFT's folder names its base and has no digest: it is looked at, and used in place."""
    mine = shutil.copytree(made / "runs/tiny/train", place / "mine")
    for name in ("manifest.json", "base.json"):
        (mine / name).unlink()
    code, _, err = pippin("run", "tiny.toml", "--set", "model.adapter=mine")
    assert code == 0, err
    assert not (place / "runs/tiny/train").exists()
    scores = json.loads((place / "runs/tiny/evaluate-merged/scores.json").read_text())
    wanted = json.loads((made / "runs/tiny/evaluate-merged/scores.json").read_text())
    assert scores["loss"] == pytest.approx(wanted["loss"])
    code, answer, err = pippin("generate", "mine", "1 =", "--base", "model")
    assert code == 0, err
    assert answer
    given = RECIPE.replace("[model]", '[model]\nadapter = "mine"')
    (place / "mine.toml").write_text(given)
    code, _, err = pippin("generate", "mine.toml", "1 =")
    assert "tuned model mine" in err


def write_other(folder):
    """The same layers, twice as wide."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained("model")
    config.hidden_size, config.head_dim = 128, 32
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained("model").save_pretrained(folder)


@pytest.fixture
def small_disk(place):
    """Mounts a tmpfs of a few pages on `runs`; `options` as mount takes them."""
    mounted = []

    def mount(options):
        (place / "runs").mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place / "runs")]
        if shutil.which("mount") is None or subprocess.run(command, check=False).returncode:
            pytest.skip("this user may not mount a disk")
        mounted.append(place / "runs")

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


def test_full_disk_loses_nothing(place, fails, pippin, small_disk):
    small_disk("size=200k")
    error, hint = fails("run", "tiny.toml", "--set", "evaluate.topk=200")
    assert "disk" in error
    assert "out" in hint
    code, _, err = pippin("run", "tiny.toml", "--set", "evaluate.topk=200", "--set", "out=more")
    assert code == 0, err


def test_no_permission(place, fails, small_disk):
    small_disk("ro")
    assert "permission" in fails("run", "tiny.toml")[0]


@pytest.mark.parametrize(
    ("stage", "name"),
    [("train", "SIGINT"), ("train", "SIGTERM"), ("merge", "SIGINT"), ("quantize", "SIGTERM")],
)
def test_stopped_anywhere_it_goes_on(place, fails, pippin, monkeypatch, stage, name):
    show = printers.LinePrinter.show

    def strike(self, event):
        show(self, event)
        if isinstance(event, Progress) and event.stage == stage and event.done == 2:
            os.kill(os.getpid(), getattr(signal, name))

    with monkeypatch.context() as patch:
        patch.setattr(printers.LinePrinter, "show", strike)
        error, _ = fails("run", "tiny.toml", code=130)
    assert error.startswith(
        "error: stopped after update " if stage == "train" else "error: stopped"
    )
    assert not (place / "runs/tiny" / stage).exists()
    code, _, err = pippin("run", "tiny.toml")
    assert code == 0
    assert ("going on after update" in err) == (stage == "train")


def test_reader_that_goes_away(made):
    code = f"{sys.executable} -m pippin"
    script = f"{code} version | head -c 1"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, cwd=made, check=False
    )
    assert done.stderr == ""


@pytest.mark.parametrize("option", [("--temperature", "nan"), ("--top-p", "nan")])
def test_a_figure_that_is_no_number(place, fails, option):
    error, _ = fails("generate", "tiny.toml", "1 =", *option, code=2)
    assert "not a finite number" in error


def test_bytes_that_are_no_text_are_asked_all_the_same(place, pippin):
    asked = os.fsdecode(b"\xff =")
    assert pippin("generate", "model", asked, "--max-tokens", "2")[0] == 0


def test_a_file_that_may_not_be_read_is_named(place, fails, monkeypatch):
    """Root may read everything, so the refusal is played."""

    def refuse(path, *arguments):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(weights, "file_tensors", refuse)
    error, hint = fails("run", "tiny.toml")
    assert "no permission for model/model.safetensors" in error
    assert "permissions" in hint
