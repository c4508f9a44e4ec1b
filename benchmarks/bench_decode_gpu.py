"""Decoding on one CUDA device: OpenLLaMA-3B's shape, dense and in 4 bits, recorded and plain steps.

A recorded step is one CUDA graph; a plain one is sent off kernel by kernel, as transformers does.
Random weights, greedy, one answer; the first tokens, in which the prompt is read, are left out.
"""

import copy
import time
from typing import Any

import numpy as np

import common
from bench_lora_gpu import network
from gpu_common import device, release

PROMPT, FIRST, TOKENS, GROUP = 64, 8, 136, 64


def main() -> None:
    """Decode on both sides in this process, dense first, then print the rows."""
    options = common.arguments(__doc__ or "").parse_args()
    rows = []
    for name, bits in (("decode-bf16-cuda", 16), ("decode-int4-cuda", 4)):
        made = network("w1-bf16").eval()
        if bits < 16:
            pack_linears(made, bits)
        rows.append(row_of(name, made))
        del made
        release()
    common.report(rows, options.save, device())


def row_of(name: str, made: Any) -> common.Row:
    """Recorded steps beside plain ones."""
    (said, rate, recorded), (plain_said, plain_rate, _) = (decode(made, plain=p) for p in (0, 1))
    assert recorded, "the steps were not recorded"
    pairs = zip(said, plain_said, strict=True)
    same = next((n for n, (ours, theirs) in enumerate(pairs) if ours != theirs), TOKENS)
    limit = read_rate() / read_bytes(made)
    return common.Row(
        name=name,
        value=round(rate, 1),
        unit="tokens per second",
        better="higher",
        limit=round(limit),
        share_of_limit=round(rate / limit, 3),
        peers={"plain steps": round(plain_rate, 1)},
        notes={"prompt": PROMPT, "tokens until the answers differ": same},
    )


def decode(made: Any, *, plain: bool) -> tuple[list[int], float, bool]:
    """The answer, tokens a second, and whether steps were recorded."""
    from pippin.engines import Sampling
    from pippin.engines.torch import generate

    seen, find = [], generate._Group._recorded

    def recorded(*inputs: Any) -> Any:
        seen.append(None if plain else find(*inputs))
        return seen[-1]

    generate._Group._recorded = recorded
    prompt = np.random.default_rng(0).integers(3, 32000, PROMPT).astype(np.int32)
    said, clocks = [], []
    for (token,) in generate.generate(made, [prompt], Sampling(max_tokens=TOKENS)):
        said.append(token)
        clocks.append(time.perf_counter())
    generate._Group._recorded = find
    rate = (TOKENS - 1 - FIRST) / (clocks[-1] - clocks[FIRST])
    return said, rate, seen[0] is not None


def pack_linears(made: Any, bits: int) -> None:
    """Random codes in the place of the layers' linears, on a grid that keeps their size."""
    import torch

    from pippin.engines.torch.packed_cuda import kernel_for
    from pippin.quantizers import Grid

    grid, cache = Grid(bits=bits, group_size=GROUP, symmetric=False), {}
    parents = [part for layer in made.model.layers for part in (layer.self_attn, layer.mlp)]
    for parent in parents:
        for name, linear in list(parent.named_children()):
            if isinstance(linear, torch.nn.Linear):
                shape = tuple(linear.weight.shape)
                if shape not in cache:
                    cache[shape] = kernel_for(grid, shape)(random_codes(bits, shape), None)
                setattr(parent, name, copy.deepcopy(cache[shape]).to("cuda"))


def random_codes(bits: int, shape: tuple[int, int]) -> Any:
    """Uniform between -0.04 and 0.04; scales and biases in bfloat16, as a folder has them."""
    import ml_dtypes

    from pippin.quantizers import Codes

    scales = np.full((shape[0], shape[1] // GROUP), 0.08 / 2**bits)
    return Codes(
        codes_OI=np.random.default_rng(0).integers(0, 2**bits, shape).astype(np.uint8),
        scales_OG=scales.astype(ml_dtypes.bfloat16),
        biases_OG=(scales * -(2**bits - 1) / 2).astype(ml_dtypes.bfloat16),
    )


def read_bytes(made: Any) -> int:
    """What a step reads of the weights: all but the embedding."""
    held = [*made.model.layers.parameters(), *made.model.layers.buffers(), made.lm_head.weight]
    return sum(x.numel() * x.element_size() for x in held)


def read_rate() -> float:
    """Bytes a second, read and written, of a large copy."""
    import torch

    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda")
    target, times = torch.empty_like(source), []
    for _ in range(8):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return 2.0 * len(source) / float(np.median(times[2:]))


if __name__ == "__main__":
    main()
