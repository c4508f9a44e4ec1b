"""A run without a framework: a model folder of a few numbers, and stages that only leave marks."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from pippin import artifact
from pippin.artifact import Origin
from pippin.events import Event, Finished, Progress, Started
from pippin.job import Job
from pippin.machine import Machine
from pippin.recipe import Data, Deploy, Evaluate, Model, Quantize, Recipe, Train
from pippin.stages.quantize import quantize

MACHINE = Machine(
    chip="Test Chip",
    system="Linux x86_64",
    cores=2,
    memory_total=16_000_000_000,
    memory_available=8_000_000_000,
    shared_memory=False,
    native_bfloat16=False,
    gflops=100.0,
    engines=("torch",),
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
    "torch_dtype": "float32",
}
LAYER = {
    "self_attn.q_proj": (8, 8),
    "self_attn.k_proj": (4, 8),
    "self_attn.v_proj": (4, 8),
    "self_attn.o_proj": (8, 8),
    "mlp.gate_proj": (16, 8),
    "mlp.up_proj": (16, 8),
    "mlp.down_proj": (8, 16),
}


def write_model(folder: Path) -> Path:
    """A Llama of a few hundred weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tensors = {f"model.layers.0.{n}.weight": np.ones(s, np.float32) for n, s in LAYER.items()}
    tensors["model.embed_tokens.weight"] = np.ones((32, 8), np.float32)
    save_file(tensors, folder / "model.safetensors")
    return folder


def make_recipe(folder: Path) -> Recipe:
    """A recipe over that model and a file of two rows, its run in `folder`/out."""
    write_model(folder / "model")
    (folder / "rows.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    return Recipe(
        model=Model(source="model"),
        data=Data(source="rows.jsonl", max_seq_len=64),
        train=Train(steps=4, row_tokens=64),
        evaluate=Evaluate(rows=2, generate_rows=0),
        deploy=Deploy(targets=()),
        out=str(folder / "out"),
        name="demo",
        folder=folder,
    )


def change(recipe: Recipe, **tables: dict) -> Recipe:
    """The recipe with some keys of some tables changed."""
    return replace(recipe, **{t: replace(getattr(recipe, t), **new) for t, new in tables.items()})


def fake_stage(stage: str):
    """Writes what depends on its settings and inputs, and for an evaluation its scores."""

    def run(job: Job) -> Iterator[Event]:
        yield Started(stage=stage, title=job.folder.name, total=1)
        scores = {"subject": job.subject, "loss": 1.5, "kl": 0.0, "top1": 1.0, "gain_kept": 1.0}
        with artifact.writing(job.folder, job.origin, {}) as folder:
            made_of = [job.origin.inputs, job.origin.settings]
            (folder / "mark.json").write_text(json.dumps(made_of, sort_keys=True, default=list))
            if stage == "evaluate":
                (folder / "scores.json").write_text(json.dumps(scores))
        yield Progress(stage=stage, done=1, values={})
        yield Finished(stage=stage, folder=str(job.folder), summary={})

    return run


def write_speaking_model(folder: Path, dtype: str = "float32", **shape: Any) -> Path:
    """A Llama of two layers with random weights, tied, and a tokenizer of single bytes.

    `shape` replaces fields of its configuration.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    ).save_pretrained(folder)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    special = {"bos_token_id": 0, "eos_token_id": 1}
    config = LlamaConfig(vocab_size=len(vocab), **{**sizes, **special, **shape})
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def quantize_folder(model: Path, folder: Path, **settings: Any) -> Path:
    """The stage `quantize` alone, on a folder that no run made."""
    recipe = Recipe(
        model=Model(source="x"),
        data=Data(source="x"),
        quantize=Quantize(**{"method": "rtn", **settings}),
    )
    origin = Origin(stage="quantize", inputs={}, settings={}, versions={})
    inputs = {"model": model}
    job = Job(stage="quantize", recipe=recipe, inputs=inputs, folder=folder, origin=origin)
    list(quantize(job))
    return folder


RECIPE = """\
[model]
source = "model"
device = "cpu"
dtype = "float32"

[data]
source = "rows"
max_seq_len = 64

[lora]
rank = 4

[train]
steps = 4
row_tokens = 64
learning_rate = 0.01

[quantize]
method = "rtn"
bits = 8
group_size = 32
embed_group_size = 32

[evaluate]
rows = 4
generate_rows = 2
max_tokens = 4
prompts = ["1 ="]
prompt_tokens = 4

[deploy]
targets = []
"""


def write_rows(folder: Path) -> Path:
    """Small questions and answers in train, valid and test files."""
    folder.mkdir()
    for split, count in {"train": 12, "valid": 4, "test": 4}.items():
        rows = [{"prompt": f"{i} =", "completion": f" {i * i}"} for i in range(count)]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines)
    return folder
