"""Walking a plan: what is skipped, refused and made again; gates, locks, single verbs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pippin import run as running
from pippin import targets
from pippin.artifact import read_manifest
from pippin.errors import GateError, PippinError, UsageError
from pippin.events import Finished, Notice
from pippin.plan import make_plan
from pippin.recipe import Gate
from pippin.run import done_steps, run, with_refusals
from pippin.targets import PACKAGES, TARGETS
from tests.tiny_runs import MACHINE, change, fake_stage, make_recipe

ALL = [
    "evaluate-base",
    "train",
    "evaluate-adapter",
    "merge",
    "evaluate-merged",
    "quantize",
    "evaluate-quantized",
]


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "stage_function", fake_stage)
    return make_recipe(tmp_path)


def walk(recipe, only=None, redo=()):
    """(made, skipped, notices) of a run."""
    events = list(run(make_plan(recipe, MACHINE), only, redo))
    finished = [e for e in events if isinstance(e, Finished)]
    made = [Path(e.folder).name for e in finished if not e.skipped]
    skipped = [Path(e.folder).name for e in finished if e.skipped]
    return made, skipped, [e.text for e in events if isinstance(e, Notice)]


def test_all_steps_in_order_then_nothing_to_do(recipe):
    assert walk(recipe) == (ALL, [], [])
    assert walk(recipe) == ([], ALL, [])
    assert (Path(recipe.out) / "report.html").exists()
    assert done_steps(make_plan(recipe, MACHINE)) == set(ALL)


def test_full_fine_tuning_has_nothing_to_merge(recipe):
    made, _, _ = walk(change(recipe, train={"method": "full"}))
    assert made == [name for name in ALL if "merge" not in name]


def test_changed_settings_of_one_stage_leave_those_before_alone(recipe):
    walk(recipe)
    other = change(recipe, quantize={"bits": 8})
    with pytest.raises(PippinError, match=r"quantize\.bits 4 -> 8") as caught:
        walk(other)
    assert "--redo quantize" in caught.value.hint
    made, skipped, notices = walk(other, redo=["quantize"])
    assert made == ["quantize", "evaluate-quantized"]
    assert skipped == ALL[:5]
    assert any("evaluate-quantized is made again: input model" in n for n in notices)


def test_redo_all_makes_everything_again(recipe):
    walk(recipe)
    assert walk(recipe, redo=["all"])[0] == ALL


@pytest.mark.parametrize(
    "tables",
    [
        {"train": {"checkpoint_every": 7, "keep_checkpoints": 5, "gradient_checkpointing": True}},
        {"train": {"spike": 0.0}, "model": {"device": "cpu"}},
        {"gates": {"quantized": Gate(max_kl=0.5)}},
        {"deploy": {"context": 99}},
    ],
)
def test_harmless_keys_change_nothing(recipe, tables):
    walk(recipe)
    assert walk(change(recipe, **tables)) == ([], ALL, [])


@pytest.mark.parametrize(
    ("tables", "stage", "named"),
    [
        ({"lora": {"rank": 8}}, "train", "lora.rank 16 -> 8"),
        ({"data": {"max_seq_len": 32}}, "evaluate", "data.max_seq_len 64 -> 32"),
        ({"train": {"learning_rate": 1e-3}}, "train", "train.learning_rate 0.0002 -> 0.001"),
        ({"evaluate": {"prompts": ("hi",)}}, "evaluate", "evaluate.prompts"),
    ],
)
def test_other_settings_are_refused_by_name(recipe, tables, stage, named):
    walk(recipe)
    with pytest.raises(PippinError) as caught:
        walk(change(recipe, **tables))
    assert named in caught.value.message
    assert f"--redo {stage}" in caught.value.hint


def test_changed_data_is_refused_not_trained_on_unasked(recipe):
    walk(recipe)
    (recipe.folder / "rows.jsonl").write_text('{"text": "three"}\n')
    with pytest.raises(PippinError, match="input data"):
        walk(recipe)


def test_damaged_stage_is_made_again_with_a_notice(recipe):
    walk(recipe)
    (Path(recipe.out) / "merge" / "mark.json").unlink()
    made, skipped, notices = walk(recipe)
    assert made == ["merge"]
    assert len(skipped) == len(ALL) - 1
    assert any("mark.json is missing" in n for n in notices)


def test_a_changed_gate_is_checked_again_and_the_report_written(recipe):
    walk(recipe)
    (Path(recipe.out) / "report.html").unlink()
    with pytest.raises(GateError, match="merged: top-1"):
        walk(change(recipe, gates={"merged": Gate(min_top1=1.5)}))
    assert (Path(recipe.out) / "report.html").exists()


def test_a_verb_names_the_stage_that_is_missing(recipe):
    with pytest.raises(PippinError, match=r"merge needs .*train, which is not there") as caught:
        walk(recipe, only="merge")
    assert "pippin train" in caught.value.hint
    assert walk(recipe, only="train") == (["train"], [], [])
    assert walk(recipe, only="merge") == (["merge"], [], [])


def test_evaluate_measures_what_is_there(recipe):
    walk(recipe, only="train")
    made, _, notices = walk(recipe, only="evaluate")
    assert made == ["evaluate-base", "evaluate-adapter"]
    assert any("merged left out" in n for n in notices)


def test_a_verb_refuses_a_parent_made_from_other_settings(recipe):
    walk(recipe)
    with pytest.raises(PippinError, match=r"train was made from other settings: lora\.rank"):
        walk(change(recipe, lora={"rank": 4}), only="merge")


def test_no_such_stage_in_this_recipe(recipe):
    with pytest.raises(PippinError, match="no deploy stage") as refused:
        walk(recipe, only="deploy")
    assert "deploy.targets" in refused.value.hint


def test_a_foreign_folder_is_refused_before_any_work(recipe):
    (recipe.folder / "out" / "quantize").mkdir(parents=True)
    (recipe.folder / "out" / "quantize" / "mine.txt").write_text("mine")
    with pytest.raises(PippinError, match="quantize exists and was not made by pippin"):
        list(run(make_plan(recipe, MACHINE)))
    assert [path.name for path in (recipe.folder / "out").glob("[!.]*")] == ["quantize"]


def test_foreign_folder_is_refused(recipe):
    folder = Path(recipe.out) / "train"
    folder.mkdir(parents=True)
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(PippinError, match="not made by pippin"):
        walk(recipe)
    assert (folder / "thesis.txt").read_text() == "mine"


def test_targets_are_asked_before_any_work(recipe, monkeypatch):
    monkeypatch.setattr(running, "check_recipe", lambda *_: [("cannot hold it", "use 8 bits")])
    with pytest.raises(PippinError, match="cannot hold it"):
        walk(change(recipe, deploy={"targets": ("executorch",)}))
    assert not (Path(recipe.out) / "evaluate-base").exists()


HOLD = """
import sys, time
from pathlib import Path
from pippin.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_two_runs_do_not_share_a_folder_and_a_dead_one_does_not_hold_it(recipe):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, recipe.out], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(PippinError, match=f"process {holder.pid}"):
            walk(recipe)
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    assert (Path(recipe.out) / ".lock").read_text() == f"{holder.pid}\n", "left behind"
    assert walk(recipe)[0] == ALL


def test_read_only_out(recipe, tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PippinError, match="no permission"):
            walk(recipe)
    finally:
        tmp_path.chmod(0o700)


def test_redo_of_a_stage_that_the_verb_does_not_make_is_refused(recipe):
    walk(recipe)
    with pytest.raises(UsageError, match="--redo train is not for `pippin quantize`"):
        walk(recipe, only="quantize", redo=("train",))
    assert walk(recipe, only="quantize", redo=("all",))[0] == ["quantize"]


def test_no_report_of_a_run_that_never_was(recipe):
    with pytest.raises(PippinError, match="there is no run in"):
        running.report(make_plan(recipe, MACHINE))


def test_a_key_that_came_with_an_upgrade_leaves_finished_stages_finished(recipe):
    walk(recipe)
    path = Path(recipe.out) / "train" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["settings"]["train.beta2"]
    path.write_text(json.dumps(manifest))
    assert walk(recipe)[0] == []
    with pytest.raises(PippinError, match=r"train\.beta2 0\.999 -> 0\.5"):
        walk(change(recipe, train={"beta2": 0.5}))


@pytest.mark.parametrize("context", [4, 65])
def test_a_context_that_the_model_lacks_is_refused_before_any_work(recipe, context):
    asked = change(recipe, deploy={"targets": ("hf",), "context": context})
    with pytest.raises(PippinError, match=f"context of {context} tokens.* up to 64"):
        walk(asked)
    assert not (Path(recipe.out) / "evaluate-base").exists()


@pytest.mark.parametrize("target", TARGETS)
def test_a_package_that_a_target_lacks_is_told_before_any_work(recipe, monkeypatch, target):
    lacking = PACKAGES[target][0]
    monkeypatch.setattr(targets, "find_spec", lambda name: None if name == lacking else name)
    asked = change(recipe, deploy={"targets": (target,), "context": 64})
    with pytest.raises(PippinError, match=f"{target} needs the package {lacking}"):
        walk(asked)
    assert not (Path(recipe.out) / "evaluate-base").exists()


def test_training_alone_needs_no_packages_of_targets(recipe, monkeypatch):
    monkeypatch.setattr(targets, "find_spec", lambda _: None)
    asked = change(recipe, deploy={"targets": ("hf",), "context": 64})
    assert walk(asked, only="train") == (["train"], [], [])


def test_a_plan_tells_what_its_targets_refuse(recipe, monkeypatch):
    monkeypatch.setattr(targets, "find_spec", lambda _: None)
    asked = change(recipe, deploy={"targets": ("hf",), "context": 65})
    refusals = with_refusals(make_plan(asked, MACHINE)).refusals
    assert [message for message, _ in refusals] == [
        "target hf needs the package compressed_tensors, which is not installed",
        "a context of 65 tokens, the least is 8; the model knows positions up to 64",
    ]


def failing(subject):
    """Stages, of which the one with this subject fails."""

    def stage_function(stage):
        def run_stage(job):
            if job.subject == subject:
                raise PippinError(f"{subject}: it computes something else", "other versions")
            yield from fake_stage(stage)(job)

        return run_stage

    return stage_function


@pytest.mark.parametrize("only", [None, "deploy"])
def test_a_format_that_fails_leaves_the_others_and_is_told_at_the_end(recipe, monkeypatch, only):
    asked = change(recipe, deploy={"targets": ("gguf", "hf", "mlx"), "context": 64})
    walk(recipe)
    monkeypatch.setattr(running, "check_recipe", lambda *_: [])
    monkeypatch.setattr(running, "stage_function", failing("hf"))
    with pytest.raises(PippinError, match="hf: it computes something else"):
        walk(asked, only=only)
    made = sorted(path.name for path in Path(recipe.out).glob("deploy-*"))
    assert made == ["deploy-gguf", "deploy-mlx"]


def test_a_format_that_fails_when_it_is_made_again_is_not_evaluated_as_it_was(recipe, monkeypatch):
    asked = change(recipe, deploy={"targets": ("gguf", "mlx"), "context": 64})
    monkeypatch.setattr(running, "check_recipe", lambda *_: [])
    walk(asked)
    monkeypatch.setattr(running, "stage_function", failing("gguf"))
    with pytest.raises(PippinError, match="gguf: it computes something else"):
        walk(change(asked, deploy={"context": 32}), redo=("deploy",))
    folders = (Path(recipe.out) / name for name in ("deploy-gguf", "deploy-mlx"))
    contexts = [read_manifest(folder)["settings"]["deploy.context"] for folder in folders]
    assert contexts == [64, 32]
