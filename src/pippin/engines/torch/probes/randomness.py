"""Probes of random numbers: the same from a seed, others from another, and distributed as asked."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import dropout

from pippin.check import Case
from pippin.check.families import Single
from pippin.engines.torch.probes.bench import Bench

COUNT = 100_003
# Standard errors: a sound generator with a fixed seed passes or fails for good.
SIGMAS = 5.0
SEEDS = "draw on the CPU; adapters are, and sampling inverts numpy's draws"
NO_DROPOUT = "set lora.dropout = 0"


def reproducible(bench: Bench) -> Iterator[Case]:
    """A seed gives the same numbers again, whatever was drawn between."""
    for name, draw in _DRAWS.items():
        first = _seeded(bench, 7, draw)
        torch.rand(11, device=bench.device)
        yield name, 1.0 - _same(_seeded(bench, 7, draw), first)


def independent(bench: Bench) -> Iterator[Case]:
    """Another seed, or the next call, gives other numbers."""
    with _fork(bench):
        torch.manual_seed(7)
        first, second = (torch.rand(COUNT, device=bench.device) for _ in range(2))
    other = _seeded(bench, 8, _DRAWS["uniform"])
    # Two sound draws of 24 bits rarely agree anywhere.
    yield "the next call", float(_same(first, second) > 1e-4)
    yield "another seed", float(_same(first, other) > 1e-4)


def distributed(bench: Bench) -> Iterator[Case]:
    """Means and spreads, in standard errors over the five that are allowed."""
    for name, draw in _DRAWS.items():
        values = _seeded(bench, 1, draw).cpu().double()
        mean, spread = _MOMENTS[name]
        off = (values.mean().item() - mean) / (spread / COUNT**0.5)
        yield f"mean of {name}", abs(off) / SIGMAS
        yield f"spread of {name}", abs(values.std().item() / spread - 1) / 0.02


def masks(bench: Bench) -> Iterator[Case]:
    """Dropout keeps the share it should, scales it, and its gradient has the same mask."""
    x = torch.ones(COUNT, device=bench.device, requires_grad=True)
    with _fork(bench):
        torch.manual_seed(3)
        out = dropout(x, 0.25)
    out.sum().backward()
    assert x.grad is not None
    yield "gradient", 1.0 - _same(out.detach(), x.grad)
    kept = (out > 0).double().cpu().mean().item()
    yield "share kept", float(abs(kept - 0.75) > SIGMAS * (0.75 * 0.25 / COUNT) ** 0.5)
    scaled = out[out > 0].detach().cpu()
    yield "scale", float((scaled - 4 / 3).abs().max() > 1e-6)


_DRAWS: dict[str, Callable[[torch.device], Tensor]] = {
    "uniform": lambda device: torch.rand(COUNT, device=device),
    "normal": lambda device: torch.randn(COUNT, device=device),
    "integers": lambda device: torch.randint(0, 1000, (COUNT,), device=device),
    "coins": lambda device: torch.empty(COUNT, device=device).bernoulli_(0.3),
}
_MOMENTS = {
    "uniform": (0.5, 12**-0.5),
    "normal": (0.0, 1.0),
    "integers": (499.5, (999_999 / 12) ** 0.5),
    "coins": (0.3, 0.21**0.5),
}


def _seeded(bench: Bench, seed: int, draw: Callable[[torch.device], Tensor]) -> Tensor:
    with _fork(bench):
        torch.manual_seed(seed)
        return draw(bench.device)


def _fork(bench: Bench):
    """Random numbers outside go on as if nothing had been drawn."""
    gpu = bench.device.type != "cpu"
    kind = bench.device.type if gpu else "cuda"
    return torch.random.fork_rng([bench.device.index or 0] if gpu else [], device_type=kind)


def _same(a: Tensor, b: Tensor) -> float:
    return (a.cpu() == b.cpu()).double().mean().item()


FAMILIES = (
    Single(name="random.reproducible", measure=reproducible, remedy=SEEDS, avoid=""),
    Single(name="random.independent", measure=independent, remedy=SEEDS, avoid=""),
    Single(name="random.distribution", measure=distributed, remedy=SEEDS, tolerance=1.0, avoid=""),
    Single(name="random.dropout", measure=masks, remedy=NO_DROPOUT, avoid=""),
)
