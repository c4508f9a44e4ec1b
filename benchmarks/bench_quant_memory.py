"""What quantizing a synthetic checkpoint takes: peak memory, and `rtn`'s time beside a copy.

A Llama of 7B's proportions, scaled down: `--layers` of 202 million weights each where `--width` is
4096. Both figures are of a process of their own that does nothing else; memory is its peak resident
set above what it had with everything imported.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

import common

MIB = 1 << 20
BF16 = np.dtype(ml_dtypes.bfloat16)
VOCABULARY = 32000
TOKENS = 1024


def main() -> None:
    """Make the checkpoint, quantize and copy it, print the rows."""
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--runs", type=int, default=3, help="of which the fastest counts")
    parser.add_argument("--scratch", type=Path, help="a folder on a disk with room")
    parser.add_argument("--only", choices=CHILDREN, help="one of the processes")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        what, *folders = options.child
        print(json.dumps(CHILDREN[what](*map(Path, folders))))
        return
    asked = [options.only] if options.only else list(CHILDREN)
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        source = Path(scratch) / "model"
        largest, size = make_checkpoint(source, options.width, options.layers)
        if "rtn" in asked:
            runs = options.runs
            found = fastest(lambda out: child("rtn", source, out), Path(scratch) / "q", runs)
            copied = fastest(lambda out: copy_seconds(source, out), Path(scratch) / "copy", runs)
            common.report(rows(found, copied, largest, size), options.save)
        if "calibrate" in asked:
            found = child("calibrate", source, Path(scratch) / "states")
            common.report([calibrated_row(found, source, size)], options.save)


def fastest(run: Callable[[Path], dict[str, float]], out: Path, runs: int) -> dict[str, float]:
    """The run that others disturbed least."""
    found = []
    for _ in range(runs):
        found.append(run(out))
        shutil.rmtree(out)
    return min(found, key=lambda one: one["wall"])


def child(what: str, source: Path, target: Path) -> dict[str, float]:
    """What a process of its own found."""
    command = [sys.executable, __file__, "--child", what, str(source), str(target)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def make_checkpoint(folder: Path, width: int, layers: int) -> tuple[int, int]:
    """A shard a layer, and one for the embedding; bytes of the largest tensor and of all."""
    folder.mkdir()
    wide = width * 11 // 4 // 128 * 128
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": width,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 128,
        "num_key_value_heads": width // 128,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    attention = {f"self_attn.{n}_proj": (width, width) for n in "qkvo"}
    mlp = {f"mlp.{n}_proj": (wide, width) for n in ("gate", "up")}
    shapes = {**attention, **mlp, "mlp.down_proj": (width, wide)}
    rng, where = np.random.default_rng(0), {}
    parts = {n: (rng.standard_normal(s, np.float32) * 0.02).astype(BF16) for n, s in shapes.items()}
    embedding = (rng.standard_normal((VOCABULARY, width), np.float32) * 0.02).astype(BF16)
    norms = {
        "input_layernorm": np.ones(width, BF16),
        "post_attention_layernorm": np.ones(width, BF16),
    }
    for layer in range(layers + 1):
        tensors = {f"model.layers.{layer}.{n}.weight": t for n, t in {**parts, **norms}.items()}
        if layer == layers:
            tensors = {
                "model.embed_tokens.weight": embedding,
                "model.norm.weight": np.ones(width, BF16),
            }
        name = f"model-{layer + 1:05}-of-{layers + 1:05}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return max(embedding.nbytes, *(part.nbytes for part in parts.values())), size


def quantize_once(source: Path, target: Path) -> dict[str, float]:
    """In a process of its own: bytes above what imports take, wall and CPU-seconds."""
    from pippin import recipe
    from pippin.artifact import Origin
    from pippin.job import Job
    from pippin.quantizers import load_quantizer
    from pippin.stages.quantize import quantize

    load_quantizer("rtn")
    settings = recipe.Quantize(
        method="rtn", bits=4, scheme="affine", embed_scheme="affine", embed_group_size=64
    )
    data, model = recipe.Data(source="none"), recipe.Model(source="none")
    made = recipe.Recipe(model=model, data=data, quantize=settings)
    origin = Origin(stage="quantize", inputs={}, settings={}, versions={})
    job = Job(stage="quantize", recipe=made, inputs={"model": source}, folder=target, origin=origin)
    before, wall, cpu = _peak(), time.monotonic(), time.process_time()
    for _ in quantize(job):
        pass
    return {
        "peak": _peak() - before,
        "imports": before,
        "wall": time.monotonic() - wall,
        "cpu": time.process_time() - cpu,
    }


def calibrate_once(source: Path, scratch: Path) -> dict[str, float]:
    """Moments by loss layer by layer, each Hessian made ready: bytes above what imports take."""
    from pippin.data.batches import Sample, single_batches
    from pippin.engines import load_engine
    from pippin.model.config import read_config
    from pippin.model.weights import Checkpoint
    from pippin.quantizers.choices import choose_all
    from pippin.recipe import Quantize
    from pippin.stages.calibration import Calibration, in_layers, passes

    engine, checkpoint = load_engine("torch", "cpu"), Checkpoint(source)
    choices = choose_all(checkpoint, read_config(source), Quantize(method="best"))
    parts = passes(checkpoint, choices, read_config(source), 1 << 40)
    rng = np.random.default_rng(0)
    samples = [
        Sample(tokens=rng.integers(0, VOCABULARY, 128), scored=np.arange(128) > 0, row=row)
        for row in range(TOKENS // 128)
    ]
    before, wall, cpu = _peak(), time.monotonic(), time.process_time()
    model = engine.load_layers(checkpoint, "bfloat16", scratch)
    assert model is not None
    calibration = Calibration(
        model=model,
        checkpoint=checkpoint,
        batches=single_batches(samples, 2),
        rows=len(samples),
        tokens=TOKENS,
        notices=(),
        by_loss=True,
        by_layer=True,
    )
    for part in in_layers(parts, back=True):
        for name, hessian in calibration.hessians(part):
            assert hessian is not None, name
            assert hessian.feedback.shape == hessian.matrix_II.shape, name
    return {
        "peak": _peak() - before,
        "imports": before,
        "wall": time.monotonic() - wall,
        "cpu": time.process_time() - cpu,
    }


CHILDREN = {"rtn": quantize_once, "calibrate": calibrate_once}


def _peak() -> int:
    """The peak resident set. Linux's ru_maxrss starts at what the parent had; VmHWM does not."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def copy_seconds(source: Path, target: Path) -> dict[str, float]:
    """Of copying the folder."""
    wall, cpu = time.monotonic(), time.process_time()
    shutil.copytree(source, target)
    return {"wall": time.monotonic() - wall, "cpu": time.process_time() - cpu}


def rows(
    found: dict[str, float], copied: dict[str, float], largest: int, size: int
) -> list[common.Row]:
    """Memory in MiB, time as a multiple of the copy's."""
    notes: dict[str, Any] = {
        "checkpoint GB": round(size / 1e9, 2),
        "largest tensor MiB": round(largest / MIB, 1),
        "imports MiB": round(found["imports"] / MIB, 1),
    }
    seconds = {"quantize": found, "copy": copied}
    return [
        common.Row(
            name="rtn-peak-memory",
            value=round(found["peak"] / MIB, 1),
            unit="MiB above the imports",
            better="lower",
            limit=round(largest / MIB + 256, 1),
            notes=notes,
        ),
        common.Row(
            name="rtn-time-over-copy",
            value=round(found["wall"] / copied["wall"], 2),
            unit="times a copy of the folder",
            better="lower",
            limit=2.0,
            notes={
                **notes,
                **{
                    f"{k} s": {u: round(v, 2) for u, v in s.items() if u in ("wall", "cpu")}
                    for k, s in seconds.items()
                },
            },
        ),
    ]


def calibrated_row(found: dict[str, float], source: Path, size: int) -> common.Row:
    """Memory in MiB beside the largest layer, its moments and a GiB."""
    from pippin import memory
    from pippin.model.config import read_config

    config = read_config(source)
    moments = memory.moment_bytes(config) // config.num_layers
    layer = 2 * sum(i * o for i, o in memory.linear_shapes(config).values())
    return common.Row(
        name="calibrate-peak-memory",
        value=round(found["peak"] / MIB, 1),
        unit="MiB above the imports",
        better="lower",
        limit=round((layer + moments) / MIB + 1024, 1),
        notes={
            "checkpoint GB": round(size / 1e9, 2),
            "layer MiB": round(layer / MIB, 1),
            "its Hessians MiB": round(moments / MIB, 1),
            "tokens": TOKENS,
            "CPU-seconds": round(found["cpu"], 1),
        },
    )


if __name__ == "__main__":
    main()
