"""The plan's memory against the memory that training takes: models of random weights, in children.

Every run is `pippin train` of a recipe, two updates in a process of its own. On a CPU the
peak resident set of that process counts, on CUDA the allocator's peak. `--fit` runs other shapes
and lengths instead: those that the constants of pippin/memory.py were read off.
"""

import argparse
import json
import random
import shutil
import string
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import common

LLAMA: dict[str, Any] = {"model_type": "llama", "tie_word_embeddings": True}


def shape(base: dict[str, Any], sizes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """A config from (vocabulary, hidden, feed-forward, heads, kv heads, channels of a head)."""
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    keys += ("num_key_value_heads", "head_dim")
    return {**base, **dict(zip(keys, sizes, strict=True)), **more}


SHAPES = {
    "smollm2-135m": shape(LLAMA, (49152, 576, 1536, 9, 3, 64)),
    "llama-3.2-1b": shape(LLAMA, (128256, 2048, 8192, 32, 8, 64)),
    "qwen2.5-0.5b": shape({**LLAMA, "model_type": "qwen2"}, (151936, 896, 4864, 14, 2, 64)),
    "gemma-3-270m": shape(
        {**LLAMA, "model_type": "gemma3_text", "sliding_window": 512, "query_pre_attn_scalar": 256},
        (262144, 640, 2048, 4, 1, 256),
    ),
    # Only for the constants:
    "llama-a": shape(LLAMA, (32000, 768, 2304, 12, 4, 64)),
    "llama-b": shape(LLAMA, (65536, 1024, 2816, 16, 16, 64), tie_word_embeddings=False),
    "qwen3-a": shape({**LLAMA, "model_type": "qwen3"}, (65536, 768, 2048, 8, 4, 128)),
    "gemma-a": shape(
        {**LLAMA, "model_type": "gemma3_text", "sliding_window": 256, "query_pre_attn_scalar": 128},
        (65536, 512, 1536, 4, 2, 128),
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training: `method` is lora, full or qlora; `split` samples fill a row of `tokens`."""

    shape: str
    layers: int
    method: str
    tokens: int
    rows: int = 1
    split: int = 1
    checkpointing: bool = False
    dtype: str = "auto"

    @property
    def name(self) -> str:
        """In words."""
        spared = ", checkpointing" if self.checkpointing else ""
        rows = f"{self.rows} x {self.tokens}" if self.rows > 1 else str(self.tokens)
        return f"{self.shape}, {self.layers} layers, {self.method}, {rows}{spared}, {self.dtype}"


def run(name: str, layers: int, method: str, tokens: int, **more: Any) -> Run:
    """A run, its first four figures in order."""
    return Run(shape=name, layers=layers, method=method, tokens=tokens, **more)


CPU = [
    run("smollm2-135m", 30, "lora", 1024, split=4),
    run("smollm2-135m", 12, "full", 256),
    run("smollm2-135m", 4, "lora", 8192, split=4, checkpointing=True),
    run("smollm2-135m", 12, "qlora", 2048, split=2),
    run("gemma-3-270m", 18, "lora", 512, split=2),
    run("gemma-3-270m", 6, "lora", 2048, split=8, checkpointing=True),
    run("llama-3.2-1b", 4, "lora", 1024, split=2),
    run("llama-3.2-1b", 3, "lora", 2048, split=4, checkpointing=True, dtype="float32"),
    run("llama-3.2-1b", 6, "qlora", 512),
    run("qwen2.5-0.5b", 8, "lora", 2048, split=4),
    run("qwen2.5-0.5b", 4, "lora", 512, split=2, dtype="float32"),
    run("qwen2.5-0.5b", 6, "lora", 4096, split=8, checkpointing=True),
]
CPU_FIT = [
    run("llama-a", 12, "lora", 768, split=3),
    run("llama-a", 12, "lora", 768, split=3, dtype="float32"),
    run("llama-a", 6, "lora", 3072, split=6, checkpointing=True),
    run("llama-a", 6, "full", 384),
    run("llama-a", 8, "qlora", 1536, split=3),
    run("llama-b", 8, "lora", 1536, split=3),
    run("qwen3-a", 8, "lora", 1536, split=3),
    run("gemma-a", 8, "lora", 1536, split=6),
    run("gemma-a", 4, "full", 768, split=6, dtype="float32"),
]
CUDA = [
    run("smollm2-135m", 30, "lora", 8192, split=16),
    run("smollm2-135m", 30, "full", 4096, split=8),
    run("smollm2-135m", 30, "lora", 4096, split=8, rows=2, checkpointing=True),
    run("smollm2-135m", 30, "qlora", 2048),
    run("gemma-3-270m", 18, "lora", 2048, split=8),
    run("gemma-3-270m", 18, "lora", 8192, split=16, checkpointing=True),
    run("llama-3.2-1b", 16, "lora", 8192, split=8),
    run("llama-3.2-1b", 16, "lora", 1024, checkpointing=True),
    run("llama-3.2-1b", 4, "qlora", 4096, split=4),
    run("llama-3.2-1b", 8, "full", 2048, split=4),
    run("qwen2.5-0.5b", 24, "lora", 4096, split=8),
    run("qwen2.5-0.5b", 24, "lora", 256),
]
CUDA_FIT = [
    run("llama-a", 12, "lora", 6144, split=6),
    run("llama-b", 8, "lora", 3072, split=6, checkpointing=True),
    run("llama-a", 12, "full", 3072, split=6),
    run("qwen3-a", 8, "lora", 3072, split=6),
    run("gemma-a", 8, "lora", 3072, split=12),
    run("gemma-a", 8, "full", 1536, split=6),
]
SETS = {"cpu": (CPU, CPU_FIT), "cuda": (CUDA, CUDA_FIT)}


def main() -> None:
    """Make each model once, train it in children, print the two rows."""
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--device", choices=SETS, default="cpu")
    parser.add_argument("--fit", action="store_true", help="the runs the constants are read off")
    parser.add_argument("--only", default="", help="numbers of runs, comma-separated")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--read", type=Path, help="print the rows of a file that --out wrote")
    parser.add_argument("--out", type=Path, help="a file that takes each run's figures as JSON")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        asked = Run(**json.loads(options.child))
        print(json.dumps(measure(asked, options.folder, options.device)))
        return
    if options.read:
        found = [json.loads(text) for text in options.read.read_text().splitlines()]
    else:
        found = list(measured(options))
    if found and not options.fit:
        common.report(rows_of(found), options.save, gpu_of(options.device))


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The figures of every run that was asked for, as they come."""
    runs = SETS[options.device][options.fit]
    numbers = [int(n) for n in options.only.split(",") if n] or range(len(runs))
    asked = [runs[n] for n in numbers]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.jobs) as pool:
        folders = [Path(scratch) / str(n) for n in numbers]
        if options.jobs == 1:
            make_inputs(asked, folders)
        pairs = zip(asked, folders, strict=True)
        begun = [pool.submit(in_child, options.device, run, folder) for run, folder in pairs]
        for each in (future.result() for future in as_completed(begun)):
            if each is None:
                continue
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(each) + "\n")
            print(line(each), file=sys.stderr, flush=True)
            yield each


def in_child(device: str, asked: Run, folder: Path) -> dict[str, Any] | None:
    """The figures of one run; None, and its last words printed, where it failed."""
    if not folder.exists():
        make_inputs([asked], [folder])
    command = [sys.executable, __file__, "--device", device, "--child", json.dumps(asdict(asked))]
    done = subprocess.run(
        [*command, "--folder", str(folder)], capture_output=True, text=True, check=False
    )
    shutil.rmtree(folder)
    if done.returncode:
        print(f"{asked.name}: {done.stderr[-3000:]}", flush=True)
        return None
    return {"name": asked.name, **json.loads(done.stdout.splitlines()[-1])}


def line(each: dict[str, Any]) -> str:
    """One run to read."""
    parts = {name: round(count / 1e6) for name, count in each["parts"].items()}
    return (
        f"{each['name']}: forecast {each['forecast'] / 1e6:.0f} MB, measured "
        f"{each['measured'] / 1e6:.0f} MB, {error(each):+.1%} {parts}"
    )


def error(each: dict[str, Any]) -> float:
    """Of the forecast, relative to what was measured; negative is under it."""
    return each["forecast"] / each["measured"] - 1


def rows_of(found: list[dict[str, Any]]) -> list[common.Row]:
    """The two figures of the runs of one device."""
    errors = [error(each) for each in found]
    notes = {
        "runs": {each["name"]: round(error(each), 4) for each in found},
        "furthest under": round(min(errors), 4),
    }
    figures = {"median": float(np.median(np.abs(errors))), "worst": float(np.max(np.abs(errors)))}
    return [
        common.Row(
            name=f"memory-forecast-{name}",
            value=round(value, 4),
            unit="error of the forecast peak, relative to the measured one",
            better="lower",
            peers={"mlx-train-perf, one family": 0.09},
            notes=notes,
        )
        for name, value in figures.items()
    ]


def gpu_of(device: str) -> tuple[str, int] | None:
    """The GPU's name and memory in GB."""
    if device == "cpu":
        return None
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    name, mib = done.stdout.splitlines()[0].split(", ")
    return name, int(mib) * 2**20 // 10**9


def measure(asked: Run, folder: Path, device: str) -> dict[str, Any]:
    """Train it here; bytes forecast and measured, and the forecast's parts."""
    from pippin.forecast import Forecast, look
    from pippin.machine import find_machine

    recipe = recipe_of(asked, folder, device)
    facts = look(recipe, folder / "model")
    assert facts is not None
    forecast = Forecast(recipe=recipe, machine=find_machine(), facts=facts)
    found = {"forecast": forecast.train_peak(), "measured": train(recipe, folder)}
    return {**found, "parts": asdict(forecast.train_bytes()), "dtype": forecast.train_dtype}


def recipe_of(asked: Run, folder: Path, device: str) -> Any:
    """Its recipe: rank 16 on all linears, rows full of samples."""
    from pippin import recipe

    method: Any = "full" if asked.method == "full" else "lora"
    kind, dtype = (cast_any(value) for value in (device, asked.dtype))
    return recipe.Recipe(
        model=recipe.Model(source="model", device=kind, dtype=dtype),
        data=recipe.Data(source="rows", max_seq_len=asked.tokens // asked.split),
        train=recipe.Train(
            method=method,
            steps=2,
            row_tokens=asked.tokens,
            batch_rows=asked.rows,
            gradient_checkpointing=asked.checkpointing,
            learning_rate=1e-5,
        ),
        deploy=recipe.Deploy(targets=()),
        out=str(folder / "out"),
        name="forecast",
        folder=folder,
    )


def cast_any(value: Any) -> Any:
    """A word that a recipe takes."""
    return value


def train(recipe: Any, folder: Path) -> int:
    """Bytes at the peak of the train stage, as it reports them."""
    from pippin.artifact import Origin
    from pippin.events import Finished, Notice
    from pippin.job import Job
    from pippin.stages.train import train as stage

    job = Job(
        stage="train",
        recipe=recipe,
        inputs={"model": folder / "model"},
        folder=folder / "out" / "train",
        origin=Origin(stage="train", inputs={"model": ""}, settings={}, versions={}),
    )
    for event in stage(job):
        if isinstance(event, Notice):
            print(event.text, file=sys.stderr)
        if isinstance(event, Finished):
            return event.summary["peak_memory_bytes"]
    raise AssertionError("training did not finish")


def make_inputs(asked: list[Run], folders: list[Path]) -> None:
    """`model` and `rows` of every run, in one process: what that takes is not measured."""
    code = "import sys, json; sys.path[:0] = [sys.argv[1]]; import bench_forecast as b; "
    code += "from pathlib import Path; "
    code += "[b.write_inputs(b.Run(**run), Path(at)) for run, at in json.loads(sys.argv[2])]"
    pairs = [(asdict(run), str(folder)) for run, folder in zip(asked, folders, strict=True)]
    command = [sys.executable, "-c", code, str(Path(__file__).parent), json.dumps(pairs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def write_inputs(asked: Run, folder: Path) -> None:
    """Rows whose samples fill them, and a model in bfloat16, quantized where the run asks it."""
    folder.mkdir(parents=True)
    rng, length = random.Random(0), asked.tokens // asked.split
    letters = string.ascii_letters
    (folder / "rows").mkdir()
    for part, updates in {"train": 2, "valid": 1, "test": 1}.items():
        count = updates * asked.rows * asked.split
        texts = ["".join(rng.choices(letters, k=length - 1)) for _ in range(count)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / "rows" / f"{part}.jsonl").write_text(lines)
    dense = folder / ("dense" if asked.method == "qlora" else "model")
    write_model(asked, dense)
    if asked.method == "qlora":
        quantize(dense, folder / "model")
        shutil.rmtree(dense)


def write_model(asked: Run, folder: Path) -> None:
    """Random weights, and a tokenizer of single bytes."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {
        t: i for i, t in enumerate(["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    ).save_pretrained(folder)
    raw = {**SHAPES[asked.shape], "num_hidden_layers": asked.layers}
    config = transformers.AutoConfig.for_model(**raw, max_position_embeddings=8192)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 0, 1, 1
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        network = transformers.AutoModelForCausalLM.from_config(config)
    network.to("cpu").save_pretrained(folder)


def quantize(dense: Path, folder: Path) -> None:
    """Four bits in groups of 64, the embedding in eight: the recipe's own defaults."""
    from pippin import recipe
    from pippin.artifact import Origin
    from pippin.job import Job
    from pippin.stages.quantize import quantize as stage

    asked = recipe.Recipe(model=recipe.Model(source="dense"), data=recipe.Data(source="rows"))
    origin = Origin(stage="quantize", inputs={}, settings={}, versions={})
    job = Job(
        stage="quantize",
        recipe=replace(asked, folder=dense.parent),
        inputs={"model": dense},
        folder=folder,
        origin=origin,
    )
    for _ in stage(job):
        pass


if __name__ == "__main__":
    main()
