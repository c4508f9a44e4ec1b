"""The bytes that the plan says layers keep, against what autograd saves in a training step."""

import itertools

import numpy as np
import pytest
import torch
import transformers

from pippin.data.batches import Sample, lay_out
from pippin.engines.torch.engine import TorchEngine
from pippin.layer_memory import TrainShape, _norm_kept
from pippin.model.adapter import adapted_linears, new_adapter
from pippin.model.config import read_config
from pippin.model.weights import Checkpoint
from pippin.recipe import Lora, Train
from pippin.train_memory import train_bytes

TOKENS, SPLIT, LAYERS = 512, 4, 3
SIZES = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "tie_word_embeddings": True,
}
GEMMA = {"sliding_window": 256, "query_pre_attn_scalar": 32}


def write_model(folder, kind):
    extra = GEMMA if kind == "gemma3_text" else {}
    config = transformers.AutoConfig.for_model(kind, **SIZES, **extra)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def make_trainer(folder, method, dtype, lora, attention="auto"):
    train = Train(method=method, row_tokens=TOKENS)
    model = TorchEngine(torch.device("cpu"), attention=attention).load(folder, dtype)
    if method == "full":
        return model.trainer(train, None, {}, 0)
    linears = adapted_linears(Checkpoint(folder), lora)
    return model.trainer(train, lora, new_adapter(linears, lora, 0), 0)


def saved_bytes(trainer):
    """Storages that autograd saves in one forward pass, parameters and the head's loss left out."""
    length = TOKENS // SPLIT
    rng = np.random.default_rng(0)
    samples = [
        Sample(
            tokens=rng.integers(3, 300, length).astype(np.int32),
            scored=np.arange(length) > 0,
            row=0,
        )
        for _ in range(SPLIT)
    ]
    rows = trainer.ability.layout(lay_out([samples], TOKENS), torch.device("cpu"))
    held = {p.untyped_storage().data_ptr() for p in trainer.network.parameters()}
    found = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            found[storage.data_ptr()] = storage
        return tensor

    trainer.network.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = trainer._loss(rows)
    assert loss.requires_grad
    return sum(storage.nbytes() for storage in found.values())


MATH = [("llama", dtype, "lora", "math") for dtype in ("float32", "bfloat16")]
FUSED = itertools.product(
    ("llama", "qwen2", "qwen3", "gemma3_text"), ("float32", "bfloat16"), ("lora", "full"), ("auto",)
)


@pytest.mark.parametrize(("kind", "dtype", "method", "attention"), [*FUSED, *MATH])
def test_layers_keep_what_a_training_saves(tmp_path, kind, dtype, method, attention):
    lora = Lora(rank=8)
    folder = write_model(tmp_path / kind, kind)
    linears = adapted_linears(Checkpoint(folder), lora) if method == "lora" else {}
    trained = sum(8 * (i + o) for i, o in linears.values())
    shape = TrainShape(
        device="cpu",
        tokens=TOKENS,
        longest=TOKENS // SPLIT,
        itemsize=4 if dtype == "float32" else 2,
        trained=trained,
        checkpointing=0.0,
        adapted=frozenset(n.rpartition(".")[2] for n in linears),
        rank=8,
        math=attention == "math",
    )
    config = read_config(folder)
    forecast = train_bytes(config, shape).kept - 4 * trained  # gradients are not there yet
    angles, indices = 2 * 32 * shape.itemsize, 4 * 8
    # An adapter's first norm keeps nothing, as nothing below it is trained; the last one does.
    last = _norm_kept(config, shape) * 96 if method == "full" else 0
    found = saved_bytes(make_trainer(folder, method, dtype, lora, attention))
    assert forecast + TOKENS * (last + angles + indices) == pytest.approx(found, rel=0.005)
