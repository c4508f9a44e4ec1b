"""The MLX engine beside mlx-lm on one CUDA device: LoRA training of gpu_common's w1, decoding.

Both take mlx-lm's own Llama with random weights. mlx-lm's step is its compiled one over batches of
samples of like length, padded; pippin packs. Only real tokens count. Every batch is taken twice and
the second time counts: both sides prepare kernels for a shape that they meet for the first time.
"""

import argparse
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

import common
import gpu_common
from pippin import recipe
from pippin.data.batches import BatchPlan
from pippin.engines import Sampling

LORA = gpu_common.ADAPTERS["w1"]
ROOM = 45 << 30  # bytes; the fastest packing within it counts
BATCHES = 12
PROMPT, TOKENS, TURNS = 64, 128, 24  # turns: the host sets the pace, and it wavers by a fifth


def main() -> None:
    """Run both sides in this process, one after the other, then print the rows."""
    common.PACKAGES = (*common.PACKAGES, "mlx", "mlx-lm", "mlx-cuda-13")
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--only", default="train,decode", help="of train and decode")
    parser.add_argument("--tokens", default="8192", help="tokens a step, comma-separated")
    parser.add_argument("--peer", default="32", help="mlx-lm's rows a batch, comma-separated")
    options = parser.parse_args()
    rows = []
    if "train" in options.only:
        rows.append(training_row(options))
    if "decode" in options.only:
        rows.append(decoding_row())
    common.report(rows, options.save, gpu_common.device())


def training_row(options: argparse.Namespace) -> common.Row:
    """Real tokens a second and peak memory."""
    rate = matmul_flops()
    print(f"bf16 product {rate / 1e12:.0f} TFLOP/s", flush=True)
    ours = {}
    for tokens in map(int, options.tokens.split(",")):
        ours[tokens] = pippin(tokens)
        print("pippin", tokens, gpu_common.describe(ours[tokens]), flush=True)
    theirs = {}
    for size in map(int, filter(None, options.peer.split(","))):
        theirs[size] = mlx_lm(size)
        print("mlx-lm", size, gpu_common.describe(theirs[size]), flush=True)
    fitting = [t for t, run in ours.items() if run.peak <= ROOM] or list(ours)
    tokens = max(fitting, key=lambda t: ours[t].speed)
    best = ours[tokens]
    limit = 1.0 / gpu_common.seconds_per_token("w1-bf16", {"bf16": rate})
    peers = {f"mlx-lm, batch {size}": round(run.speed) for size, run in theirs.items()}
    notes = {
        "tokens a step": tokens,
        "mlx-lm's peak GiB": {str(size): run.gib for size, run in theirs.items()},
        "tokens a step: speed, peak GiB": {
            str(t): [round(run.speed), run.gib] for t, run in ours.items()
        },
    }
    return gpu_common.speed_row("mlx-w1-bf16", best, limit, peers, notes)


def decoding_row() -> common.Row:
    """Greedy decoding of one answer at 4 bits in groups of 64."""
    from mlx import nn

    network = make_network()
    nn.quantize(network, group_size=64, bits=4)
    prompt = np.random.default_rng(0).integers(3, 32000, PROMPT).astype(np.int32)
    sides = {"pippin": decode_pippin, "mlx-lm": decode_mlx_lm}
    rates: dict[str, list[float]] = {side: [] for side in sides}
    answers = {}
    for _ in range(TURNS):
        for side, decode in sides.items():
            answers[side], rate = timed(decode(network, prompt))
            rates[side].append(rate)
    print("decode", rates, flush=True)
    # mlx-lm picks from log-probabilities rounded to bfloat16, where random weights nearly tie.
    pairs = zip(answers["pippin"], answers["mlx-lm"], strict=True)
    same = next((n for n, (ours, theirs) in enumerate(pairs) if ours != theirs), TOKENS + 1)
    speeds = {side: float(np.median(seen[1:])) for side, seen in rates.items()}
    return common.Row(
        name="mlx-decode-4bit-cuda",
        value=round(speeds["pippin"], 1),
        unit="tokens per second",
        better="higher",
        peers={"mlx-lm": round(speeds["mlx-lm"], 1)},
        spread=round(float(np.std(rates["pippin"][1:]) / speeds["pippin"]), 3),
        notes={
            "median ratio": round(
                float(np.median(np.divide(rates["pippin"], rates["mlx-lm"])[1:])), 3
            ),
            "prompt": PROMPT,
            "tokens": TOKENS,
            "tokens until the answers differ": same,
            "shape": "OpenLLaMA-3B",
            "group size": 64,
        },
    )


def make_network() -> Any:
    """mlx-lm's Llama with random bfloat16 weights, as our loader leaves it."""
    import mlx.core as mx
    from mlx_lm.models import llama

    from pippin.engines.mlx.attention import accept_positions

    mx.random.seed(0)
    network = llama.Model(llama.ModelArgs(model_type="llama", **gpu_common.OPEN_LLAMA_3B))
    network.set_dtype(mx.bfloat16)
    accept_positions(network)
    network.freeze()
    mx.eval(network.parameters())
    mx.clear_cache()
    return network


def loaded(network: Any) -> Any:
    """What our engine makes of a network."""
    from pippin.engines.mlx.body import Loaded, find_head

    head = find_head(network, gpu_common.OPEN_LLAMA_3B)
    assert head is not None, "the head is no plain product"
    return Loaded(network=network, head=head, longest=None, notices=())


def pippin(tokens: int) -> gpu_common.Run:
    """Our trainer over our packing, `tokens` in one row a step."""
    import mlx.core as mx

    from pippin.engines.mlx.device import pick_device
    from pippin.engines.mlx.names import lora_places
    from pippin.engines.mlx.trainer import MlxTrainer
    from pippin.model.adapter import new_adapter

    pick_device("cuda")
    network = make_network()
    hidden = gpu_common.OPEN_LLAMA_3B["hidden_size"]
    linears = {
        f"model.layers.{layer}.self_attn.{target}": (hidden, hidden)
        for layer in range(len(network.layers))
        for target in LORA.targets
    }
    places = lora_places(network, LORA, new_adapter(linears, LORA, seed=0))
    train = recipe.Train(row_tokens=tokens, learning_rate=gpu_common.RATE)
    trained = MlxTrainer(loaded(network), places, train, 0)
    plan = BatchPlan(gpu_common.samples(), train, seed=0)
    mx.reset_peak_memory()
    results, rates = [], []
    for number in range(BATCHES):
        batches = plan.batches(number)
        for upcoming in (number, number + 1):
            start = time.perf_counter()
            results.append(trained.step(batches, gpu_common.RATE, partial(plan.batches, upcoming)))
            spent = time.perf_counter() - start
        rates.append(sum(batch.real_tokens for batch in batches) / spent)
    return run_of(rates, results[0].loss_sum / results[0].tokens, results[0].grad_norm)


def run_of(rates: list[float], loss: float, norm: float) -> gpu_common.Run:
    """With the allocator's peak."""
    import mlx.core as mx

    return gpu_common.Run(speeds=rates, peak=mx.get_peak_memory(), loss=loss, grad_norm=norm)


def mlx_lm(size: int) -> gpu_common.Run:
    """mlx-lm's loss, batches and compiled step; `size` samples of like length."""
    import mlx.core as mx
    import mlx.optimizers as optimizers
    from mlx import nn
    from mlx_lm.tuner.trainer import default_loss
    from mlx_lm.tuner.utils import linear_to_lora_layers

    network = make_network()
    keys = [f"self_attn.{target}" for target in LORA.targets]
    settings = {"rank": LORA.rank, "scale": LORA.scale, "dropout": 0.0, "keys": keys}
    linear_to_lora_layers(network, len(network.layers), settings)
    optimizer = optimizers.AdamW(learning_rate=gpu_common.RATE)
    gradient = nn.value_and_grad(network, default_loss)
    state = [network.state, optimizer.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def step(tokens_BT: mx.array, lengths_B2: mx.array) -> Any:
        (loss, _), grads = gradient(network, tokens_BT, lengths_B2)
        optimizer.update(network, grads)
        return loss

    mx.reset_peak_memory()
    losses, rates = [], []
    for tokens_BT, lengths_B2 in batches_of(size):
        for _ in range(2):
            start = time.perf_counter()
            loss = step(mx.array(tokens_BT), mx.array(lengths_B2))
            mx.eval(state, loss)
            spent = time.perf_counter() - start
        losses.append(loss.item())
        rates.append(int(lengths_B2[:, 1].sum()) / spent)
    return run_of(rates, losses[0], 0.0)


def batches_of(size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Samples sorted by length and padded to multiples of 32, batches in random order."""
    ordered = sorted(gpu_common.samples(), key=lambda sample: len(sample.tokens))
    starts = np.arange(0, len(ordered) - size, size)
    for start in np.random.default_rng(0).permutation(starts)[:BATCHES]:
        group = ordered[start : start + size]
        lengths = np.array([[0, len(sample.tokens)] for sample in group])
        tokens_BT = np.zeros((size, 1 + 32 * -(-int(lengths.max()) // 32)), np.int32)
        for row, sample in enumerate(group):
            tokens_BT[row, : len(sample.tokens)] = sample.tokens
        yield tokens_BT, lengths


def decode_pippin(network: Any, prompt: np.ndarray) -> Iterator[int]:
    """Our loop."""
    from pippin.engines.mlx.generate import Decoding, generate

    sampling = Sampling(max_tokens=TOKENS + 1)
    for step in generate(loaded(network), [prompt], sampling, how=Decoding(batched=True)):
        assert step[0] is not None
        yield step[0]


def decode_mlx_lm(network: Any, prompt: np.ndarray) -> Iterator[int]:
    """mlx-lm's loop."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    for token, _ in generate_step(mx.array(prompt), network, max_tokens=TOKENS + 1):
        yield int(token)


def timed(ids: Iterator[int]) -> tuple[list[int], float]:
    """The tokens, and tokens a second from the first on."""
    first, start = next(ids), time.perf_counter()
    rest = list(ids)
    return [first, *rest], len(rest) / (time.perf_counter() - start)


def matmul_flops() -> float:
    """Operations a second of MLX's 8,192-cube bfloat16 product."""
    import mlx.core as mx

    size, many = 8192, 20
    a, b = (mx.random.normal((size, size)).astype(mx.bfloat16) for _ in range(2))
    mx.eval([a @ b for _ in range(4)])
    start = time.perf_counter()
    for _ in range(many):
        mx.eval(a @ b)
    return 2.0 * size**3 * many / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
