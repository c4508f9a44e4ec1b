"""What a training leaves, read back by peft and transformers: the loss is the one it reported."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_runs import write_speaking_model

from pippin.artifact import Origin
from pippin.errors import ModelError
from pippin.events import Finished
from pippin.job import Job
from pippin.model.weights import Checkpoint
from pippin.recipe import Data, Lora, Model, Recipe, Train
from pippin.stages.preparing import prepare
from pippin.stages.train import train

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Threads that wait for one another on a busy machine cost more than these matrices."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_model(folder: Path, dtype: str, tied: bool) -> None:
    write_speaking_model(
        folder, dtype, hidden_size=32, intermediate_size=48, tie_word_embeddings=tied
    )


def make_job(folder: Path, **settings: Any) -> Job:
    for split, count in {"train": 12, "valid": 5}.items():
        rows = [{"prompt": f"{i} + {i} =", "completion": f" {2 * i}"} for i in range(count)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options: dict[str, Any] = {"steps": 8, "row_tokens": 64, "learning_rate": 5e-3, **settings}
    recipe = Recipe(
        model=Model(source="tiny", device="cpu", dtype="float32"),
        data=Data(source=str(folder), chat_template=False, max_seq_len=64),
        lora=Lora(rank=4, rslora=True),
        train=Train(**options),
        folder=folder,
    )
    origin = Origin(stage="train", inputs={"model": "abc"}, settings=options, versions={})
    return Job(
        stage="train",
        recipe=recipe,
        inputs={"model": folder / "model"},
        folder=folder / "run" / "train",
        origin=origin,
    )


def valid_loss(network: Any, job: Job) -> float:
    """Row by row through the model's own forward pass."""
    total, count = 0.0, 0
    for batch in prepare(job).valid:
        for b in range(len(batch.tokens_BT)):
            for number in range(1, batch.segments_BT[b].max() + 1):
                here = batch.segments_BT[b] == number
                tokens = torch.tensor(batch.tokens_BT[b][here].astype("int64"))
                scored = torch.tensor(batch.scored_BT[b][here])[1:]
                with torch.no_grad():
                    logits = network(input_ids=tokens[None]).logits[0, :-1].float()
                nats = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none")
                total, count = total + float(nats[scored].sum()), count + int(scored.sum())
    return total / count


def summary_of(job: Job) -> dict[str, Any]:
    *_, last = train(job)
    assert isinstance(last, Finished)
    return last.summary


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's
@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_gives_the_reported_loss_in_peft(tmp_path: Path, dora: bool) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    make_model(tmp_path / "model", "float32", tied=True)
    job = make_job(tmp_path, valid_every=3)
    lora = replace(job.recipe.lora, dora=dora)
    job = replace(job, recipe=replace(job.recipe, lora=lora))
    base = AutoModelForCausalLM.from_pretrained(job.inputs["model"], dtype=torch.float32).eval()
    untrained = valid_loss(base, job)
    reported = summary_of(job)["valid_loss"]
    tuned = peft.PeftModel.from_pretrained(base, job.folder).eval()
    assert valid_loss(tuned, job) == pytest.approx(reported, abs=1e-5)
    assert reported < untrained - 0.2
    told = json.loads((job.folder / "base.json").read_text())
    assert told == {"name": "tiny", "digest": "abc"}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_a_full_model_gives_the_reported_loss(
    tmp_path: Path, dtype: str, close: float, tied: bool
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_model(tmp_path / "model", dtype, tied)
    job = make_job(tmp_path, method="full")
    reported = summary_of(job)["valid_loss"]
    tuned = AutoModelForCausalLM.from_pretrained(job.folder, dtype="auto").eval()
    assert tuned.dtype == getattr(torch, dtype)
    assert valid_loss(tuned, job) == pytest.approx(reported, abs=close)
    before, after = Checkpoint(job.inputs["model"]), Checkpoint(job.folder)
    assert after.tensors.keys() == before.tensors.keys()
    for name, info in after.tensors.items():
        assert (info.dtype, info.shape) == (before.tensors[name].dtype, before.tensors[name].shape)
    assert (job.folder / "tokenizer.json").exists()
    tokenizer: Any = AutoTokenizer.from_pretrained(job.folder)
    assert tokenizer.decode(tokenizer.encode("3 + 3 =")) == "3 + 3 ="


def test_a_tied_heads_copy_in_the_base_does_not_come_back(tmp_path: Path) -> None:
    """Some folders hold the head although it is tied: trained, the copy would be the old one."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    make_model(tmp_path / "model", "float32", tied=True)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, {"format": "pt"})
    job = make_job(tmp_path, method="full")
    reported = summary_of(job)["valid_loss"]
    assert "lm_head.weight" not in Checkpoint(job.folder).tensors
    tuned = AutoModelForCausalLM.from_pretrained(job.folder).eval()
    assert valid_loss(tuned, job) == pytest.approx(reported, abs=1e-5)


def test_every_weight_of_a_quantized_model_cannot_be_trained(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "float32", tied=True)
    path = tmp_path / "model" / "config.json"
    config = {**json.loads(path.read_text()), "quantization": {"group_size": 64, "bits": 4}}
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match="is quantized"):
        list(train(make_job(tmp_path, method="full")))
