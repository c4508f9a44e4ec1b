"""The JAX engine's probes: what it computes with, each against float64 on the CPU."""

from pippin.check import Probe, Shapes
from pippin.check.families import collect

# Each module has FAMILIES, in the order of the table.
MODULES = ("arrays", "padding", "numerics", "control", "work")


def probes(device: str, shapes: Shapes) -> tuple[Probe, ...]:
    """Every probe on `auto`, `cpu`, `cuda` or `mps`; UsageError where that device is not there."""
    from pippin.engines.jax.device import pick_device
    from pippin.engines.jax.probes.bench import DTYPES, Bench

    bench = Bench(device=pick_device(device), shapes=shapes)
    return collect(__name__, MODULES, bench, {name: name for name in DTYPES})


def describe(device: str) -> str:
    """The device and JAX's version, e.g. `cpu (2 cores), JAX 0.10.2`."""
    import jax

    from pippin.engines.jax.device import describe as words
    from pippin.engines.jax.device import pick_device

    return f"{words(pick_device(device))}, JAX {jax.__version__}"
