"""The MLX engine's probes: what it computes with, each against float64 in numpy."""

from pippin.check import Probe, Shapes
from pippin.check.families import collect

# Each module has FAMILIES, in the order of the table.
MODULES = ("attention", "products", "training", "arrays", "network")


def probes(device: str, shapes: Shapes) -> tuple[Probe, ...]:
    """Every probe on `auto`, `cpu`, `cuda` or `mps`; UsageError where that device is not there."""
    from pippin.engines.mlx.blas import preload

    preload()
    from pippin.engines.mlx.device import pick_device
    from pippin.engines.mlx.probes.bench import DTYPES

    pick_device(device)
    return collect(__name__, MODULES, shapes, DTYPES)


def describe(device: str) -> str:
    """The device and MLX's version, e.g. `cpu (2 cores), MLX 0.32.4`."""
    from importlib.metadata import version

    from pippin.engines.mlx.device import describe as words
    from pippin.engines.mlx.device import pick_device

    return f"{words(pick_device(device))}, MLX {version('mlx')}"
