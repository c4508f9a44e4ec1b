"""The two sides of bench_mlx.py, each run in a process of its own: pippin's and mlx-lm's.

mlx-lm runs through its own `train` and its own batches, with rope's base put where it looks for it,
Adam's bias correction on and every linear adapted, as pippin does.
"""

import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import bench_train
from pippin import recipe
from pippin.data.batches import Sample, lay_out
from pippin.engines import Sampling, load_engine

LORA = bench_train.LORA
RATE, STEPS, WARM = 2e-4, 8, 2
HALF = 10
TOKENS = 48
PROMPT = "columns: City, Country, Population, Mayor\nQ: Who is the mayor of Lyon?\nSQL:"


def measured(
    run: Callable[..., tuple[list[float], list[float], list[int]]], folder: Path, shuffled: bool
) -> dict[str, Any]:
    """Tokens, CPU-seconds and peak bytes of a training."""
    steps = bench_train.samples_by_step(folder, shuffled)[:STEPS]
    _, clocks, counts = run(folder, steps, range(STEPS))
    return {
        "tokens": sum(counts[WARM:]),
        "cpu_s": clocks[-1] - clocks[WARM - 1],
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def pippin_trainer(folder: Path) -> Any:
    """A trainer on the folder with the first adapter."""
    model = load_engine("mlx", "cpu").load(folder, "float32")
    weights = bench_train.first_adapter(folder)
    return model.trainer(recipe.Train(), LORA, weights, seed=0)


def pippin(
    folder: Path, steps: list[list[Sample]], order: Sequence[int], trainer: Any = None
) -> tuple[list[float], list[float], list[int]]:
    """Mean losses, the process's clock after every step, real tokens of every step."""
    trainer = trainer or pippin_trainer(folder)
    losses, clocks, counts = [], [], []
    for number in order:
        counts.append(sum(len(s.tokens) for s in steps[number]))
        result = trainer.step([lay_out([steps[number]], counts[-1])], RATE)
        losses.append(result.loss_sum / result.tokens)
        clocks.append(time.process_time())
    return losses, clocks, counts


def mlx_lm_model(folder: Path, adapter: Path | None = None) -> Any:
    """mlx-lm's model in float32 with its own LoRA layers."""
    from pippin.engines.mlx.blas import preload

    preload()
    import mlx.core as mx
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model

    from pippin.model.config import read_raw, with_rope_keys

    model, _ = load_model(folder, model_config=with_rope_keys(read_raw(folder)))
    model.set_dtype(mx.float32)
    model.freeze()
    keys = [f"self_attn.{n}_proj" for n in "qkvo"] + [
        f"mlp.{n}_proj" for n in ("gate", "up", "down")
    ]
    settings = {"rank": LORA.rank, "scale": LORA.scale, "dropout": 0.0, "keys": keys}
    mx.random.seed(0)
    linear_to_lora_layers(model, len(model.layers), settings)
    if adapter:
        model.load_weights(str(adapter), strict=False)
    return model


def mlx_lm(
    folder: Path,
    steps: list[list[Sample]],
    order: Sequence[int],
    adapter: tuple[Path | None, Path | None] = (None, None),
) -> tuple[list[float], list[float], list[int]]:
    """The same through mlx-lm's `train` and `iterate_batches`, a step's samples at a time.

    `adapter` are the file to start from and the file to leave.
    """
    model = mlx_lm_model(folder, adapter[0])
    import mlx.optimizers as optimizers
    from mlx_lm.tuner.callbacks import TrainingCallback
    from mlx_lm.tuner.trainer import TrainingArgs, iterate_batches, train

    losses: list[float] = []
    clocks: list[float] = []

    class Clock(TrainingCallback):
        def on_train_loss_report(self, info: dict[str, Any]) -> None:
            losses.append(info["train_loss"])
            clocks.append(time.process_time())

    def batches(**settings: Any) -> Iterator[Any]:
        for number in order:
            rows = [(s.tokens.tolist(), int(s.scored.argmax())) for s in steps[number]]
            yield from iterate_batches(rows, len(rows), settings["max_seq_length"])

    with tempfile.TemporaryDirectory() as scratch:
        left = adapter[1] or Path(scratch) / "adapters.safetensors"
        settings = TrainingArgs(
            batch_size=len(steps[0]),
            iters=len(order),
            steps_per_report=1,
            steps_per_save=10**6,
            adapter_file=str(left),
        )
        optimizer = optimizers.Adam(learning_rate=RATE, bias_correction=True)
        rows = [sample for number in order for sample in steps[number]]
        train(
            model,
            optimizer,
            rows,
            None,
            settings,
            iterate_batches=batches,
            training_callback=Clock(),
        )
    return losses, clocks, [sum(len(s.tokens) for s in steps[n]) for n in order]


def resume_pippin(folder: Path) -> dict[str, Any]:
    """Through the trainer's state, as a checkpoint holds it."""
    steps = single_steps(folder)
    whole = pippin(folder, steps, range(2 * HALF))[0]
    first, second = pippin_trainer(folder), pippin_trainer(folder)
    pippin(folder, steps, range(HALF), first)
    second.restore(first.state())
    again = pippin(folder, steps, range(HALF, 2 * HALF), second)[0]
    return {"difference": float(np.abs(np.subtract(again, whole[HALF:])).max())}


def resume_mlx_lm(folder: Path) -> dict[str, Any]:
    """Through the adapter file, all that mlx-lm keeps; the data go on where they stopped."""
    steps = single_steps(folder)
    whole = mlx_lm(folder, steps, range(2 * HALF))[0]
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "adapters.safetensors"
        mlx_lm(folder, steps, range(HALF), (None, file))
        again = mlx_lm(folder, steps, range(HALF, 2 * HALF), (file, None))[0]
    return {"difference": float(np.abs(np.subtract(again, whole[HALF:])).max())}


def single_steps(folder: Path) -> list[list[Sample]]:
    """One sample a step."""
    steps = bench_train.samples_by_step(folder, shuffled=False)
    return [[sample] for step in steps for sample in step]


def convert(folder: Path) -> dict[str, Any]:
    """A 4-bit model of mlx-lm's own making, in the folder that CONVERTED names."""
    from mlx_lm.convert import convert as quantize

    from pippin.model.config import read_raw, with_rope_keys, write_raw

    target = Path(os.environ["CONVERTED"])
    quantize(str(folder), str(target), quantize=True, q_bits=4, q_group_size=64, dtype="float32")
    write_raw(target, with_rope_keys(read_raw(target)))
    return {}


def prompt_ids(folder: Path) -> list[int]:
    """The tokens of the prompt."""
    from pippin.model.tokenizer import load_tokenizer

    return list(load_tokenizer(folder).encode(PROMPT))


def decode_pippin(folder: Path) -> dict[str, Any]:
    """Our loop: the first token pays for the prompt and is not counted."""
    model = load_engine("mlx", "cpu").load(folder, "float32")
    prompt = np.array(prompt_ids(folder), np.int32)
    steps = model.generate([prompt], Sampling(max_tokens=TOKENS + 1))
    return timed(step[0] for step in steps)


def decode_mlx_lm(folder: Path) -> dict[str, Any]:
    """mlx-lm's loop on the same folder, in float32."""
    from pippin.engines.mlx.blas import preload

    preload()
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    prompt = mx.array(prompt_ids(folder))
    steps = generate_step(prompt, model, max_tokens=TOKENS + 1)
    return timed(int(token) for token, _ in steps)


def timed(ids: Iterator[Any]) -> dict[str, Any]:
    """Tokens and CPU-seconds from the first token on."""
    first = next(ids)
    start = time.process_time()
    rest = list(ids)
    return {"ids": [first, *rest], "tokens": len(rest), "cpu_s": time.process_time() - start}


SIDES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "train-pippin": lambda folder: measured(pippin, folder, shuffled=False),
    "train-mlx-lm": lambda folder: measured(mlx_lm, folder, shuffled=False),
    "shuffled-pippin": lambda folder: measured(pippin, folder, shuffled=True),
    "shuffled-mlx-lm": lambda folder: measured(mlx_lm, folder, shuffled=True),
    "decode-pippin": decode_pippin,
    "decode-mlx-lm": decode_mlx_lm,
    "resume-pippin": resume_pippin,
    "resume-mlx-lm": resume_mlx_lm,
    "convert": convert,
}
