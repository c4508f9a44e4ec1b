"""The bytes that the plan says training holds, against what autograd saves and tensors take."""

import itertools
import json
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from tests.targets.tiny_quantized import write_quantized
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pippin import memory
from pippin.data.batches import Sample, lay_out
from pippin.engines.torch import cpu_kernels
from pippin.engines.torch.engine import TorchEngine
from pippin.memory.layers import TrainShape, _norm_kept, by_hand
from pippin.memory.training import train_bytes
from pippin.model.adapter import adapted_linears, new_adapter
from pippin.model.config import read_config
from pippin.model.quantized import dense_tensors
from pippin.model.weights import Checkpoint
from pippin.quantizers import Grid
from pippin.recipe import Lora, Train

TOKENS, SPLIT, LAYERS = 512, 4, 3
SIZES = {
    "hidden_size": 128,
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


def make_trainer(folder, method, dtype, lora, attention="auto", checkpointing=False):
    train = Train(method=method, row_tokens=TOKENS, gradient_checkpointing=checkpointing)
    model = TorchEngine(torch.device("cpu"), attention=attention).load(folder, dtype)
    if method == "full":
        return model.trainer(train, None, {}, 0)
    linears = adapted_linears(Checkpoint(folder), lora)
    return model.trainer(train, lora, new_adapter(linears, lora, 0), 0)


def full_row():
    """A row of samples without padding."""
    length, rng = TOKENS // SPLIT, np.random.default_rng(0)
    drawn = [rng.integers(3, 300, length).astype(np.int32) for _ in range(SPLIT)]
    samples = [Sample(tokens=tokens, scored=np.arange(length) > 0, row=0) for tokens in drawn]
    return lay_out([samples], TOKENS)


def saved_bytes(trainer):
    """Storages that autograd saves in one forward pass, parameters and the head's loss left out."""
    rows = trainer.ability.layout(full_row(), torch.device("cpu"))
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
    shape = asked(folder, method, dtype, lora, math=attention == "math")
    config = read_config(folder)
    forecast = train_bytes(config, shape).kept
    # Angles and indices; behind layers by hand the last norm's input.
    own = SIZES["hidden_size"] * shape.itemsize
    besides = own if by_hand(config, shape) else 2 * 32 * shape.itemsize + 4 * 9
    # An adapter's first norm keeps nothing, as nothing below it is trained; the last one does.
    last = _norm_kept(config, shape) * SIZES["hidden_size"] if method == "full" else 0
    found = saved_bytes(make_trainer(folder, method, dtype, lora, attention))
    assert forecast + TOKENS * (last + besides) == pytest.approx(found, rel=0.005)


def asked(folder, method, dtype, lora, **more):
    """What the forecast is told of a training here."""
    linears = adapted_linears(Checkpoint(folder), lora) if method == "lora" else {}
    ranks = sum(lora.rank * (i + o) for i, o in linears.values())
    shape = TrainShape(
        device="cpu",
        tokens=TOKENS,
        row=TOKENS,
        longest=TOKENS // SPLIT,
        itemsize=4 if dtype == "float32" else 2,
        trained=ranks or memory.parameters(read_config(folder)),
        checkpointing=0.0,
        adapted=frozenset(n.rpartition(".")[2] for n in linears),
        rank=lora.rank,
        kernels=cpu_kernels.missing() is None,
    )
    return replace(shape, **more)


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that are there at once."""

    def __init__(self):
        super().__init__()
        self.sizes, self.now, self.top = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor)
        return made

    def see(self, tensor):
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.top = max(self.top, self.now)
            weakref.finalize(storage, self.drop, key)

    def drop(self, key):
        self.now -= self.sizes.pop(key, 0)


def peak_bytes(trainer):
    """All tensors at the high point of the second update."""
    live, rows = Live(), full_row()
    masters = trainer.optimizer.masters.values()
    for tensor in (*trainer.network.parameters(), *trainer.network.buffers(), *masters):
        live.see(tensor)
    with live:
        trainer.step([rows], 1e-4)
        live.top = 0
        trainer.step([rows], 1e-4)
    return live.top


def in_codes(folder, kind):
    """The same model with its linears in 4 bits."""
    dense = write_model(folder / "dense", kind)
    state = {name: array.astype(np.float32) for name, array in dense_tensors(dense)}
    grid = Grid(bits=4, group_size=64, symmetric=False)
    config = json.loads((dense / "config.json").read_text())
    write_quantized(folder, config, state, lambda name: grid if "_proj" in name else None)
    return folder


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("method", ["lora", "full", "qlora"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_the_peak_of_all_tensors(tmp_path, kind, method, checkpointing):
    lora = Lora(rank=8)
    folder = (in_codes if method == "qlora" else write_model)(tmp_path, kind)
    trained = "full" if method == "full" else "lora"
    packed = 0.5 + 8 / 64 if method == "qlora" else 0
    shape = asked(folder, trained, "bfloat16", lora, checkpointing=checkpointing, packed=packed)
    forecast = replace(train_bytes(read_config(folder), shape), in_checkpoint=0)  # numpy's
    found = peak_bytes(make_trainer(folder, trained, "bfloat16", lora, checkpointing=checkpointing))
    assert found == pytest.approx(forecast.total, rel=0.06)
