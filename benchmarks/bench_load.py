"""Peak memory of loading a 3 GB checkpoint, beside transformers as it comes.

The checkpoint is a Llama's in bfloat16, all weights equal. Every side loads it in a process of its
own and reads every weight once, as a forward pass would; what the process held before counts not.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import common
from pippin.model.weights import Spec, Writer

HIDDEN, FEED, HEADS, KV_HEADS, VOCAB = 2048, 8192, 32, 8, 65536
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def main() -> None:
    """Make the checkpoint, load it on every side, print the row."""
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--layers", type=int, default=23, help="23 make 3 GB")
    parser.add_argument("--side", choices=SIDES, help="run one side alone, in this process")
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(measure(SIDES[options.side], options.model)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        write_checkpoint(Path(scratch), options.layers)
        results = {side: in_own_process(side, Path(scratch)) for side in SIDES}
    common.report([row_of(results)], options.save)


def row_of(results: dict[str, dict[str, float]]) -> common.Row:
    """Peak over weights, of pippin in the checkpoint's dtype; all other sides as peers."""
    ours, *others = results
    return common.Row(
        name="load-peak-ratio",
        value=ratio(results[ours]),
        unit="peak resident memory over the weights' bytes",
        better="lower",
        limit=1.0,
        share_of_limit=round(1 / ratio(results[ours]), 3),
        peers={side: ratio(results[side]) for side in others},
        notes={"weights, GB": round(results[ours]["weights"] / 1e9, 2)},
    )


def ratio(result: dict[str, float]) -> float:
    """What loading added to the process, by the weights."""
    return round((result["peak"] - result["before"]) / result["weights"], 3)


def load_pippin(folder: Path, dtype: str) -> Any:
    """The torch engine's model."""
    from pippin.engines import load_engine

    return load_engine("torch", "cpu").load(folder, dtype).network


def load_transformers(folder: Path, dtype: str) -> Any:
    """transformers' own way."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


SIDES: dict[str, tuple[Callable[[Path, str], Any], str]] = {
    "pippin bfloat16": (load_pippin, "bfloat16"),
    "pippin float32": (load_pippin, "float32"),
    "transformers bfloat16": (load_transformers, "bfloat16"),
    "transformers float32": (load_transformers, "float32"),
}


def measure(side: tuple[Callable[[Path, str], Any], str], folder: Path) -> dict[str, float]:
    """Bytes before, at the peak, and of the weights, in this process."""
    import transformers.models.llama.modeling_llama  # noqa: F401

    load, dtype = side
    before = resident("VmRSS")
    weights = list(load(folder, dtype).parameters())
    for weight in weights:
        weight.sum().item()
    total = sum(weight.numel() * weight.element_size() for weight in weights)
    return {"before": before, "peak": resident("VmHWM"), "weights": total}


def resident(kind: str) -> int:
    """`VmRSS` or its peak `VmHWM`, bytes; Linux alone tells."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


def in_own_process(side: str, folder: Path) -> dict[str, float]:
    """The result of one side."""
    command = [sys.executable, __file__, "--side", side, "--model", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def write_checkpoint(folder: Path, layers: int) -> None:
    """A Llama of 122 MB a layer and a tied embedding of 268 MB."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FEED,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    kv = HIDDEN * KV_HEADS // HEADS
    layer = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (FEED, HIDDEN),
        "mlp.up_proj": (FEED, HIDDEN),
        "mlp.down_proj": (HIDDEN, FEED),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(layers):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    specs = {name: Spec(shape=shape, dtype=BFLOAT16) for name, shape in shapes.items()}
    with Writer(folder, specs) as writer:
        for name, shape in shapes.items():
            writer.write(name, np.full(shape, 0.01, BFLOAT16))


if __name__ == "__main__":
    main()
