"""The engine on JAX: one compact decoder for the Llama family, on cpu, cuda or mps (jax-mps)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pippin.engines.jax.engine import JaxEngine


def make_engine(device: str = "auto", remote_code: bool = False) -> "JaxEngine":
    """The engine on `auto`, `cpu`, `cuda` or `mps`; UsageError where that device is not there.

    `remote_code` has no use here: the engine runs its own decoder, never a model's code.
    """
    from pippin.engines.jax.device import pick_device
    from pippin.engines.jax.engine import JaxEngine

    return JaxEngine(pick_device(device))
