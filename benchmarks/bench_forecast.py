"""The plan's memory against the memory that training takes: models of random weights, in children.

Every run is `pippin train` of a recipe, two updates in a process of its own. On a CPU the
peak resident set of that process counts, on CUDA the allocator's peak. `--fit` runs other shapes
and lengths instead: those that the constants of the forecast were read off.
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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

import common
from forecast_runs import OTHERS, SETS, SHAPES, Run


def main() -> None:
    """Make each model once, train it in children, print the two rows."""
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--device", choices=SETS, default="cpu")
    parser.add_argument("--engine", choices=("torch", *OTHERS), default="torch")
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
    if not options.fit:
        infix = f"-{options.engine}" if options.engine in OTHERS else ""
        rows = rows_of(found, f"memory-forecast{infix}")
        common.report(rows, options.save, gpu() if options.device == "cuda" else None)


def gpu() -> tuple[str, int]:
    """Its name and memory in GB; children do without what this imports."""
    from gpu_common import device

    return device()


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The figures of every run that was asked for, as they come."""
    runs = OTHERS[options.engine] if options.engine in OTHERS else SETS[options.device][options.fit]
    numbers = [int(n) for n in options.only.split(",") if n] or range(len(runs))
    asked = [runs[n] for n in numbers]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.jobs) as pool:
        folders = [Path(scratch) / str(n) for n in numbers]
        if options.jobs == 1:
            make_inputs(asked, folders)
        pairs = zip(asked, folders, strict=True)
        begun = [pool.submit(in_child, options.device, run, folder) for run, folder in pairs]
        for each in (future.result() for future in as_completed(begun)):
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(each) + "\n")
            print(line(each), file=sys.stderr, flush=True)
            yield each


def in_child(device: str, asked: Run, folder: Path) -> dict[str, Any]:
    """The figures of one run."""
    if not folder.exists():
        make_inputs([asked], [folder])
    command = [sys.executable, __file__, "--device", device, "--child", json.dumps(asdict(asked))]
    done = subprocess.run(
        [*command, "--folder", str(folder)], capture_output=True, text=True, check=False
    )
    shutil.rmtree(folder)
    assert done.returncode == 0, f"{asked.name}: {done.stderr[-3000:]}"
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


def rows_of(found: list[dict[str, Any]], prefix: str) -> list[common.Row]:
    """The two figures of the runs of one device."""
    errors = [error(each) for each in found]
    notes = {
        "runs": {each["name"]: round(error(each), 4) for each in found},
        "furthest under": round(min(errors), 4),
    }
    figures = {"median": float(np.median(np.abs(errors))), "worst": float(np.max(np.abs(errors)))}
    return [
        common.Row(
            name=f"{prefix}-{name}",
            value=round(value, 4),
            unit="error of the forecast peak, relative to the measured one",
            better="lower",
            peers={"mlx-train-perf, one family": 0.09},
            notes=notes,
        )
        for name, value in figures.items()
    ]


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
    place: dict[str, Any] = {"engine": asked.engine, "device": device, "dtype": asked.dtype}
    return recipe.Recipe(
        model=recipe.Model(source="model", **place),
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
