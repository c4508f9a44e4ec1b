"""Probes of attention's memory: fused kernels grow with the length, others with its square.

Shape letters: H heads, L tokens, C head channels.
"""

from collections.abc import Callable, Iterator

import torch
from torch.nn.functional import scaled_dot_product_attention as fused

from pippin.check import Case
from pippin.check.families import Single
from pippin.engines.torch.probes.bench import Bench

LENGTH = 512
LINEAR = 3.0  # times the memory for twice the length; quadratic is near 4
SHORTER = "attention is not fused here: keep rows short (train.row_tokens)"


def inference(bench: Bench) -> Iterator[Case]:
    """Without gradients."""
    with torch.no_grad():
        yield f"{2 * LENGTH} tokens against {LENGTH}, times the memory", _growth(bench, False)


def training(bench: Bench) -> Iterator[Case]:
    """With gradients, backward included."""
    yield f"{2 * LENGTH} tokens against {LENGTH}, times the memory", _growth(bench, True)


def _growth(bench: Bench, tracked: bool) -> float:
    return _attention(bench, 2 * LENGTH, tracked) / _attention(bench, LENGTH, tracked)


def _attention(bench: Bench, length: int, tracked: bool) -> float:
    """Bytes that causal attention over `length` tokens allocates."""
    shape = (1, 4, length, bench.shapes.head_dim)
    query, key, value = (bench.draw(*shape, seed=s).requires_grad_(tracked) for s in range(3))

    def run() -> None:
        out = fused(query, key, value, is_causal=True)
        if tracked:
            out.sum().backward()

    run()  # what is set up once does not count
    return _ALLOCATED.get(bench.device.type, _on_cpu)(run)


def _on_cuda(run: Callable[[], None]) -> float:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return float(torch.cuda.max_memory_allocated() - before)


def _on_mps(run: Callable[[], None]) -> float:
    """The driver keeps what was taken until caches are emptied: its growth is the peak."""
    torch.mps.synchronize()
    torch.mps.empty_cache()
    before = torch.mps.driver_allocated_memory()
    run()
    torch.mps.synchronize()
    return float(max(torch.mps.driver_allocated_memory() - before, 1))


def _on_cpu(run: Callable[[], None]) -> float:
    from torch.autograd.profiler import profile

    with profile(profile_memory=True) as seen:
        run()
    return float(sum(max(event.self_cpu_memory_usage, 0) for event in seen.key_averages()))


_ALLOCATED: dict[str, Callable[[Callable[[], None]], float]] = {"cuda": _on_cuda, "mps": _on_mps}

FAMILIES = (
    Single(
        name="attention.memory, inference",
        measure=inference,
        remedy=SHORTER,
        tolerance=LINEAR,
        avoid="",
    ),
    Single(
        name="attention.memory, training",
        measure=training,
        remedy=SHORTER,
        tolerance=LINEAR,
        avoid="",
    ),
)
