"""LoRA training in JAX on one CUDA device: the model, adapter and samples of gpu_common.py.

pippin packs the samples into rows of 1,024 tokens; tunix's own model and loss, with qwix's adapter,
take padded batches (`--peer`, where both can be imported). Only real tokens count.
"""

import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import common
from gpu_common import (
    OPEN_LLAMA_3B,
    RATE,
    Run,
    adapter_of,
    describe,
    device,
    matmul_flops,
    samples,
    seconds_per_token,
    speed_row,
)
from pippin import recipe
from pippin.data.batches import Batch, BatchPlan, lay_out

NAME = "w1-bf16"
WARM, STEPS, PEER_ROWS, PEER_STEPS = 3, 20, 16, 8


def main() -> None:
    """Measure every layout of rows and the peer, then print the rows."""
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--layouts", default="16x1024", help="rows x tokens, comma-separated")
    parser.add_argument("--peer", action="store_true", help="run tunix as well")
    options = parser.parse_args()
    rate, runs = matmul_flops("bf16"), {}
    print(f"ceiling {rate / 1e12:.0f} TFLOP/s", flush=True)
    for layout in options.layouts.split(","):
        rows, tokens = map(int, layout.split("x"))
        runs[layout] = pippin(rows, tokens)
        print(layout, describe(runs[layout]), flush=True)
    peers = {}
    if options.peer:
        theirs = tunix()
        print("tunix", describe(theirs), flush=True)
        peers = {f"tunix + qwix, batch {PEER_ROWS}": round(theirs.speed)}
    common.report(rows_of(runs, peers, rate), options.save, device())


def rows_of(runs: dict[str, Run], peers: dict[str, float], rate: float) -> list[common.Row]:
    """The fastest layout, the others in its notes; and the time its first step took."""
    layout = max(runs, key=lambda name: runs[name].speed)
    best = runs[layout]
    limit = 1.0 / seconds_per_token(NAME, {"bf16": rate})
    notes = {
        "rows x tokens": layout,
        "matmul TFLOP/s": round(rate / 1e12),
        "other layouts": {n: round(r.speed) for n, r in runs.items() if n != layout},
    }
    return [
        speed_row("jax-w1-bf16", best, limit, peers, notes),
        common.Row(
            name="jax-compile-seconds-gpu",
            value=round(best.compiling, 1),
            unit="seconds of the first LoRA step of 26 layers beyond those of a step",
            better="lower",
            limit=20.0,
            share_of_limit=round(best.compiling / 20.0, 3),
        ),
    ]


def pippin(rows: int, tokens: int) -> Run:
    """Our trainer over our packing."""
    from pippin.engines.jax.device import peak_memory, pick_device
    from pippin.engines.jax.engine import JaxModel
    from pippin.engines.jax.load import Loaded
    from pippin.engines.jax.trainer import train_step
    from pippin.model.adapter import new_adapter

    place, (spec, params) = pick_device("cuda"), network()
    train = recipe.Train(row_tokens=tokens, batch_rows=rows, learning_rate=RATE)
    lora, hidden = adapter_of(NAME), spec.hidden_size
    linears = {
        f"model.layers.{number}.self_attn.{name}": (hidden, hidden)
        for number in range(spec.num_layers)
        for name in lora.targets
    }
    model = JaxModel(Loaded(spec, params, ()), {}, place)
    trainer = model.trainer(train, lora, new_adapter(linears, lora, seed=0), 0)
    plan, clocks, counts, results = BatchPlan(samples(), train, seed=0), [], [], []
    clocks.append(time.perf_counter())
    for step in range(WARM + STEPS):
        batches = plan.batches(step)
        results.append(trainer.step(batches, RATE, partial(plan.batches, step + 1)))
        clocks.append(time.perf_counter())
        counts.append(sum(batch.real_tokens for batch in batches))
    assert train_step._cache_size() == 1, "the step was compiled again"
    train_step.clear_cache()
    return run_of(clocks, counts, peak_memory(place), results[0].loss_sum / results[0].tokens)


def run_of(clocks: list[float], counts: list[int], peak: int, loss: float) -> Run:
    """The first steps are left out; what the first took beyond a later one is compilation."""
    seconds = np.diff(clocks)
    return Run(
        speeds=list((np.array(counts) / seconds)[WARM:]),
        peak=peak,
        loss=loss,
        compiling=float(seconds[0] - np.median(seconds[WARM:])),
    )


def network() -> tuple[Any, Any]:
    """The decoder's figures, and random bfloat16 weights made on the device."""
    import jax

    from pippin.engines.jax.architecture import read_spec
    from pippin.engines.jax.load import top_shapes

    with tempfile.TemporaryDirectory() as folder:
        config = {**OPEN_LLAMA_3B, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
        Path(folder, "config.json").write_text(json.dumps(config))
        spec = read_spec(Path(folder))
    keys = iter(jax.random.split(jax.random.key(0), 100))

    @partial(jax.jit, static_argnums=1)
    def draw(key: Any, shape: tuple[int, ...]) -> Any:
        return 0.02 * jax.random.normal(key, shape, "bfloat16") + (len(shape) == 1)

    def stack(shape: tuple[int, ...]) -> Any:
        if len(shape) == 1:
            return jax.numpy.ones((spec.num_layers, *shape), "bfloat16")
        return draw(next(keys), (spec.num_layers, *shape))

    top = {name: draw(next(keys), shape) for name, shape in top_shapes(spec).items()}
    return spec, {**top, "layers": {name: stack(shape) for name, shape in spec.shapes().items()}}


def tunix() -> Run:
    """tunix's Llama, its trainer's loss and step, qwix's LoRA on q and v, batches padded."""
    import jax
    import optax
    import qwix
    from flax import nnx
    from tunix.models.llama3 import model as llama

    from pippin.engines.jax.device import peak_memory

    place, shape = jax.devices()[0], OPEN_LLAMA_3B
    config = llama.ModelConfig(
        num_layers=shape["num_hidden_layers"],
        vocab_size=shape["vocab_size"],
        embed_dim=shape["hidden_size"],
        hidden_dim=shape["intermediate_size"],
        num_heads=shape["num_attention_heads"],
        head_dim=shape["head_dim"],
        num_kv_heads=shape["num_key_value_heads"],
        rope_theta=10_000,
        norm_eps=shape["rms_norm_eps"],
    )
    graph, state = nnx.split(nnx.eval_shape(lambda: llama.Llama3(config, rngs=nnx.Rngs(0))))
    draw = jax.jit(
        lambda shape: 0.02 * jax.random.normal(jax.random.key(0), shape, "bfloat16"),
        static_argnums=0,
    )
    made = nnx.merge(graph, jax.tree.map(lambda weight: draw(weight.shape), state))
    lora = adapter_of(NAME)
    provider = qwix.LoraProvider(module_path=".*(q_proj|v_proj)", rank=lora.rank, alpha=lora.alpha)
    made = qwix.apply_lora_to_model(made, provider, rngs=nnx.Rngs(1), **made.get_model_input())
    optimizer = nnx.Optimizer(made, optax.adamw(RATE), wrt=nnx.LoRAParam)

    def loss_of(made: Any, tokens_BT: Any, real_BT: Any) -> Any:
        columns = jax.numpy.arange(tokens_BT.shape[1])
        seen_BTT = (columns[:, None] >= columns)[None] & real_BT[:, None]
        positions_BT = jax.numpy.broadcast_to(columns, tokens_BT.shape)
        logits, _ = made(tokens_BT, positions_BT, None, seen_BTT)
        hits = jax.nn.one_hot(tokens_BT[:, 1:], logits.shape[-1]) * real_BT[:, 1:, None]
        return -(jax.nn.log_softmax(logits[:, :-1]) * hits).sum() / real_BT[:, 1:].sum()

    @nnx.jit(donate_argnames=("optimizer",))
    def step(made: Any, optimizer: Any, tokens_BT: Any, real_BT: Any) -> Any:
        gradient = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, nnx.LoRAParam))
        loss, found = gradient(made, tokens_BT, real_BT)
        optimizer.update(made, found)
        return loss

    clocks, counts, losses = [time.perf_counter()], [], []
    for batch in padded_batches():
        losses.append(float(step(made, optimizer, batch.tokens_BT, batch.segments_BT > 0)))
        clocks.append(time.perf_counter())
        counts.append(batch.real_tokens)
    return run_of(clocks, counts, peak_memory(place), losses[0])


def padded_batches() -> list[Batch]:
    """Samples in their order, every batch as long as the longest of all: one compilation."""
    drawn = samples()[: PEER_ROWS * (WARM + PEER_STEPS)]
    groups = (drawn[i : i + PEER_ROWS] for i in range(0, len(drawn), PEER_ROWS))
    longest = max(len(sample.tokens) for sample in drawn)
    return [lay_out([[sample] for sample in group], longest) for group in groups]


if __name__ == "__main__":
    main()
