"""Attention over short samples on a CPU, forward and backward: float32 beside bfloat16 kernels.

The figure behind FLOAT32_BELOW in engines/torch/cpu_attention.py: bfloat16 inputs are attended in
float32, conversions included, below the length where that stops being faster.
"""

import time
from unittest import mock

import torch

import common
from pippin.engines.torch import cpu_attention

HEADS, KV_HEADS, CHANNELS, REPEATS = 9, 3, 64, 20
LENGTHS = (32, 96, 192, 384, 512)


def main() -> None:
    """One row a length, one thread."""
    options = common.arguments(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    common.report([row(length) for length in LENGTHS], options.save)


def row(length: int) -> common.Row:
    """CPU-milliseconds of one sample, in float32, with the bfloat16 kernel as the peer."""
    return common.Row(
        name=f"attention-cpu-{length}",
        value=round(milliseconds(length, below=length + 1), 3),
        unit="CPU-ms, one bfloat16 sample forward and backward, attended in float32",
        better="lower",
        peers={"attended in bfloat16": round(milliseconds(length, below=0), 3)},
    )


def milliseconds(length: int, below: int) -> float:
    """The best of a few runs."""
    shapes = [(1, length, heads, CHANNELS) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    inputs = [torch.randn(shape).bfloat16().transpose(1, 2).requires_grad_() for shape in shapes]
    grad, times = torch.randn(shapes[0]).bfloat16(), []
    spans = (cpu_attention.Span(0, length),)
    with mock.patch.object(cpu_attention, "FLOAT32_BELOW", below):
        for _ in range(REPEATS):
            start = time.process_time()
            out = cpu_attention.attend_samples(*inputs, spans, CHANNELS**-0.5)
            out.backward(grad)
            times.append(time.process_time() - start)
    return min(times) * 1e3


if __name__ == "__main__":
    main()
