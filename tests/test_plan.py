"""Plans: their steps and forecasts, and refusals with numbers and the nearest thing that fits."""

import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pippin import plan as planning
from pippin.errors import ModelError, PippinError, UsageError
from pippin.forecast import Forecast, look
from pippin.machine import Accelerator
from pippin.plan import make_plan
from pippin.run import with_refusals
from pippin.steps import make_steps
from pippin.ways import fastest_fits, kinds_that_fit, ways
from tests.tiny_runs import MACHINE, change, make_recipe


@pytest.fixture
def recipe(tmp_path):
    return make_recipe(tmp_path)


def test_steps_and_their_inputs(recipe):
    steps = {
        step.name: step for step in make_steps(change(recipe, deploy={"targets": ("executorch",)}))
    }
    out = recipe.folder / "out"
    assert steps["train"].inputs == {"model": recipe.folder / "model"}
    assert steps["evaluate-adapter"].inputs["parent"] == out / "evaluate-base"
    assert steps["evaluate-merged"].inputs["parent"] == out / "evaluate-adapter"
    assert steps["quantize"].inputs == {"model": out / "merge"}
    deployed = steps["evaluate-deployed-executorch"]
    assert deployed.inputs == {
        "bundle": out / "deploy-executorch",
        "parent": out / "evaluate-quantized",
        "base": out / "evaluate-base",
        "tuned": out / "evaluate-adapter",
    }
    assert deployed.subject == "deployed-executorch"
    assert steps["deploy-executorch"].subject == "executorch"


def test_an_adapter_that_is_there_is_not_trained_again(recipe):
    given = change(recipe, model={"adapter": "mine"})
    with pytest.raises(ModelError, match="mine is no adapter"):
        make_steps(given)
    (recipe.folder / "mine").mkdir()
    (recipe.folder / "mine" / "adapter_config.json").write_text("{}")
    steps = {step.name: step for step in make_steps(given)}
    assert "train" not in steps
    for name in ("evaluate-adapter", "merge"):
        assert steps[name].inputs["adapter"] == recipe.folder / "mine"
    assert steps["merge"].settings == {}


def test_what_is_trained_on_codes_is_measured_and_deployed(recipe):
    asked = change(recipe, qat={"steps": 5}, deploy={"targets": ("gguf",)})
    steps = {step.name: step for step in make_steps(asked)}
    out = recipe.folder / "out"
    assert list(steps).index("qat") == list(steps).index("quantize") + 1
    assert steps["qat"].inputs == {"model": out / "quantize"}
    for name in ("evaluate-quantized", "deploy-gguf"):
        assert steps[name].inputs["model"] == out / "qat"
    made = steps["qat"].settings
    assert {"seed", "qat.steps", "train.row_tokens"} <= made.keys()
    assert not {"train.learning_rate", "train.method"} & made.keys()
    needs = make_plan(asked, MACHINE).needs
    assert needs["qat"].memory > 400_000_000


def test_every_input_is_made_before_it_is_read(recipe):
    made = {recipe.folder / "model"}
    for step in make_steps(recipe):
        assert set(step.inputs.values()) <= made, step.name
        made.add(step.folder)


def test_what_is_not_a_folder_is_fetched_first(recipe):
    steps = make_steps(change(recipe, model={"source": "owner/name"}))
    assert (steps[0].stage, steps[0].folder) == ("fetch", recipe.folder / "out" / "model")
    assert make_steps(recipe)[0].name == "evaluate-base"


def test_slices_hold_only_what_matters(recipe):
    plain = change(recipe, quantize={"method": "rtn"})
    steps = {step.name: step for step in make_steps(plain)}
    assert "quantize.bits" in steps["quantize"].settings
    assert all(key.startswith("quantize.") for key in steps["quantize"].settings)
    assert steps["merge"].settings == {}
    train = steps["train"].settings
    assert {"seed", "lora.rank", "train.learning_rate", "data.max_seq_len"} <= set(train)
    assert not any(key.startswith(("quantize", "evaluate", "gates", "deploy")) for key in train)
    assert "train.checkpoint_every" not in train


def test_nothing_is_forecast_for_a_model_on_the_hub(recipe):
    plan = make_plan(change(recipe, model={"source": "owner/name"}), MACHINE)
    assert plan.needs == {}
    assert plan.refusals == ()
    assert "owner/name is not here yet" in with_refusals(plan).notices[-1]


def test_experts_take_no_adapter_and_the_others_are_named(recipe):
    file = recipe.folder / "model" / "model.safetensors"
    up = np.ones((16, 8), np.float32)
    experts = {f"model.layers.0.mlp.experts.{n}.up_proj.weight": up for n in range(2)}
    save_file({**load_file(file), **experts}, file)
    ((message, hint),) = make_plan(recipe, MACHINE).refusals
    assert "2 linears of experts, such as model.layers.0.mlp.experts.0.up_proj" in message
    offered = json.loads(hint.rpartition(" = ")[2])
    assert "*.self_attn.q_proj" in offered
    assert make_plan(change(recipe, lora={"targets": tuple(offered)}), MACHINE).refusals == ()
    assert make_plan(change(recipe, train={"method": "full"}), MACHINE).refusals == ()


def test_source_that_is_nothing(recipe):
    with pytest.raises(ModelError, match="no model folder"):
        make_plan(change(recipe, model={"source": "./nowhere"}), MACHINE)


def test_engine_and_device_that_are_not_here(recipe):
    with pytest.raises(UsageError, match="engine torch is not installed") as caught:
        make_plan(recipe, replace(MACHINE, engines=()))
    assert "pip install 'pippin[torch]'" in caught.value.hint
    with pytest.raises(UsageError, match=r"model\.device mps is not on this machine") as caught:
        make_plan(change(recipe, model={"device": "mps"}), MACHINE)
    assert "it has cpu" in caught.value.hint


def test_a_gpu_that_cannot_be_used_is_told(recipe):
    old = replace(MACHINE, lacking="macOS 13.6 is older than 14.0")
    assert make_plan(recipe, old).notices == (
        "computes on the CPU, as the GPU cannot be used: macOS 13.6 is older than 14.0",
    )
    with pytest.raises(UsageError, match=r"Test Chip\): macOS 13\.6 is older than 14\.0"):
        make_plan(change(recipe, model={"device": "mps"}), old)


def test_auto_takes_the_accelerator(recipe):
    gpu = Accelerator(kind="cuda", name="GPU", memory_total=2**33, memory_available=2**32)
    plan = make_plan(recipe, replace(MACHINE, accelerator=gpu))
    assert (plan.device, plan.dtype) == ("cuda", "bfloat16")
    assert (make_plan(recipe, MACHINE).device, make_plan(recipe, MACHINE).dtype) == (
        "cpu",
        "float32",
    )
    native = replace(MACHINE, native_bfloat16=True)
    assert make_plan(recipe, native).dtype == "bfloat16"


def test_mlx_computes_where_it_can(recipe):
    """In bfloat16 on a GPU; in float32 on a CPU, whatever that CPU could do."""
    mlx, host = change(recipe, model={"engine": "mlx"}), replace(MACHINE, engines=("mlx", "torch"))
    apple = Accelerator(kind="mps", name="Apple", memory_total=2**33, memory_available=2**32)
    card = replace(apple, kind="cuda", name="GPU")
    on = {
        "apple": replace(host, accelerator=apple),
        "card with mlx-cuda": replace(host, accelerator=card),
        "card without it": replace(host, accelerator=card, accelerated=("torch",)),
        "cpu": replace(host, native_bfloat16=True),
    }
    plans = {name: make_plan(mlx, machine) for name, machine in on.items()}
    assert {name: (plan.device, plan.dtype) for name, plan in plans.items()} == {
        "apple": ("mps", "bfloat16"),
        "card with mlx-cuda": ("cuda", "bfloat16"),
        "card without it": ("cpu", "float32"),
        "cpu": ("cpu", "float32"),
    }


def huge(recipe, free):
    """The plan of a batch that does not fit in `free` bytes."""
    wide = change(recipe, train={"row_tokens": 8192, "batch_rows": 4096})
    return make_plan(wide, replace(MACHINE, memory_available=free))


def test_refusal_has_the_numbers_and_what_would_fit(recipe):
    plan = huge(recipe, free=4_000_000_000)
    (message, hint), *_ = plan.refusals
    assert message.startswith("train needs about ")
    assert message.endswith("4.00 GB are free")
    assert hint.startswith("set train.batch_rows = ")
    with pytest.raises(PippinError, match="train needs about"):
        plan.raise_refusals()


def test_what_is_offered_does_fit(recipe):
    free = 4_000_000_000
    _, hint = huge(recipe, free).refusals[0]
    rows = int(hint.split("batch_rows = ")[1].split(",")[0])
    fitting = change(recipe, train={"row_tokens": 8192, "batch_rows": rows})
    assert make_plan(fitting, replace(MACHINE, memory_available=free)).refusals == ()


def forecast_of(recipe, **train):
    """Of a model of 30 layers, for rows of 1,024 tokens."""
    asked = change(recipe, train={"row_tokens": 1024, "batch_rows": 2, "accumulate": 2, **train})
    facts = look(asked, recipe.folder / "model")
    facts = replace(facts, config=replace(facts.config, num_layers=30))
    return Forecast(recipe=asked, machine=MACHINE, facts=facts)


def test_every_way_computes_the_same_updates(recipe):
    found = ways(forecast_of(recipe))
    paces = [way.pace for way in found]
    assert paces == sorted(paces)
    assert "" in [way.keys for way in found], "the recipe as it is"
    whole = re.compile(r"train\.(row_tokens|batch_rows|accumulate) = (\d+)")
    for way in found:
        sizes = {"row_tokens": 1024, "batch_rows": 2, "accumulate": 2}
        sizes |= {key: int(value) for key, value in whole.findall(way.keys)}
        assert math.prod(sizes.values()) == 4096, way.keys
        assert sizes["row_tokens"] >= recipe.data.max_seq_len


def test_more_memory_is_used_for_speed(recipe):
    forecast = forecast_of(recipe)
    sizes = sorted({way.memory for way in ways(forecast)})
    best = [fastest_fits(forecast, free) for free in sizes]
    assert all(way.memory <= free for way, free in zip(best, sizes, strict=True))
    assert [way.pace for way in best] == sorted((way.pace for way in best), reverse=True)
    assert best[-1].keys == "train.batch_rows = 4, train.accumulate = 1"
    assert "gradient_checkpointing = true" in best[0].keys
    assert fastest_fits(forecast, 0) is None


def test_samples_are_cut_only_where_nothing_else_fits(recipe):
    forecast = forecast_of(change(recipe, data={"max_seq_len": 1024}))
    least = min(way.memory for way in ways(forecast))
    assert "max_seq_len" not in fastest_fits(forecast, least).keys
    assert "data.max_seq_len = 512" in fastest_fits(forecast, least - 1).keys


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_fastest_of_each_kind_is_shown(recipe, checkpointing):
    """Whichever kind the recipe is itself."""
    kinds = kinds_that_fit(forecast_of(recipe, gradient_checkpointing=checkpointing), 2**40)
    assert sorted(way.checkpointing for way in kinds) == [False, True]


def test_a_share_of_the_layers_is_offered_where_the_recipe_may_say_it(recipe):
    for engine, offered in (("torch", True), ("mlx", False)):
        found = ways(forecast_of(change(recipe, model={"engine": engine})))
        assert any("recomputed_layers = 0.5" in way.keys for way in found) is offered


def test_a_quantized_base_is_offered_where_it_saves_memory(recipe):
    forecast = forecast_of(recipe)
    native = replace(forecast, machine=replace(MACHINE, native_bfloat16=True))
    jax = forecast_of(change(recipe, model={"engine": "jax"}))
    for each, offered in ((forecast, False), (native, True), (jax, True)):
        found = [way for way in kinds_that_fit(each, 2**40) if "quantized" in way.keys]
        assert bool(found) is offered


@pytest.mark.parametrize(("family", "grows"), [("llama", False), ("phi3", True)])
def test_a_family_that_cannot_be_read_in_turn_is_calibrated_whole(recipe, family, grows):
    forecast = forecast_of(change(recipe, quantize={"method": "gptq", "sequential": True}))
    needs = []
    for layers in (30, 60):
        config = replace(forecast.facts.config, model_type=family, num_layers=layers)
        facts = replace(forecast.facts, config=config)
        needs.append(replace(forecast, facts=facts).quantize().memory)
    assert (needs[1] > needs[0]) is grows


def test_no_room_at_all(recipe):
    plan = make_plan(recipe, replace(MACHINE, memory_available=1_000_000))
    assert any("smaller model" in hint for _, hint in plan.refusals)


def test_disk_that_is_too_small(recipe, monkeypatch):
    monkeypatch.setattr(planning.shutil, "disk_usage", lambda _: SimpleNamespace(free=9))
    message, hint = make_plan(recipe, MACHINE).refusals[-1]
    assert message.endswith("9 B are free")
    assert "set `out`" in hint


def test_memory_of_the_accelerator_counts_for_training(recipe):
    gpu = Accelerator(kind="cuda", name="GPU", memory_total=10**6, memory_available=1000)
    plan = make_plan(recipe, replace(MACHINE, accelerator=gpu))
    assert any(message.startswith("train needs") for message, _ in plan.refusals)


def test_a_gpu_that_shares_memory_takes_its_part_for_training(recipe):
    gpu = Accelerator(kind="mps", name="M", memory_total=2**34, memory_available=1000)
    plan = make_plan(recipe, replace(MACHINE, accelerator=gpu, shared_memory=True))
    refused = [message.partition(" needs")[0] for message, _ in plan.refusals]
    assert refused == ["evaluate-base", "train"]


def test_time_grows_with_updates(recipe):
    short, long = (make_plan(recipe, MACHINE, updates).needs["train"] for updates in (10, 30))
    assert long.seconds == pytest.approx(3 * short.seconds)
    assert make_plan(change(recipe, train={"steps": None}), MACHINE).needs["train"].seconds is None


def test_recomputing_takes_the_same_time_in_a_plan_and_among_the_ways(recipe):
    """Measured from 1.3 (3B parameters, CUDA) to 1.4 times (135M, one CPU thread)."""
    sizes = {"row_tokens": 1024, "batch_rows": 1, "accumulate": 1, "steps": 10}
    again = {**sizes, "gradient_checkpointing": True}
    plain, longer = (
        make_plan(change(recipe, train=asked), MACHINE).needs["train"] for asked in (sizes, again)
    )
    keys = "train.gradient_checkpointing = true"
    (way,) = (way for way in ways(forecast_of(recipe, **sizes)) if way.keys == keys)
    assert longer.seconds / plain.seconds == pytest.approx(way.pace)
    assert 1.3 <= way.pace <= 1.4
