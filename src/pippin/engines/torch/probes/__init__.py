"""The torch engine's probes: what it computes with, each against float64 on the CPU."""

from pippin.check import Probe, Shapes
from pippin.check.families import collect

# Each module has FAMILIES, in the order of the table.
MODULES = (
    "attention",
    "footprint",
    "products",
    "gradients",
    "quantized",
    "indexing",
    "numerics",
    "randomness",
    "network",
    "compiled",
)


def probes(device: str, shapes: Shapes) -> tuple[Probe, ...]:
    """Every probe on `auto`, `cpu`, `cuda` or `mps`; UsageError where that device is not there."""
    from pippin.engines.torch.device import pick_device
    from pippin.engines.torch.probes.bench import DTYPES, Bench

    bench = Bench(device=pick_device(device), shapes=shapes)
    return collect(__name__, MODULES, bench, DTYPES)


def describe(device: str) -> str:
    """The device and PyTorch's version, e.g. `cpu (2 cores), PyTorch 2.13.0`."""
    import torch

    from pippin.engines.torch.device import describe as words
    from pippin.engines.torch.device import pick_device

    return f"{words(pick_device(device))}, PyTorch {torch.__version__}"
