"""The engine on MLX and mlx-lm's models: native on Apple silicon, and on Linux CPUs."""

from typing import TYPE_CHECKING

from pippin.quiet import quiet_imports

if TYPE_CHECKING:
    from pippin.engines.mlx.engine import MlxEngine


def make_engine(device: str = "auto", remote_code: bool = False) -> "MlxEngine":
    """The engine on `auto`, `cpu`, `cuda` or `mps`; UsageError where that device is not there.

    `remote_code` runs the modelling code in a model's folder where its config names some.
    """
    from pippin.engines.mlx.blas import preload

    preload()  # before MLX is imported: its own BLAS is many times slower
    with quiet_imports():
        from pippin.engines.mlx.device import pick_device
        from pippin.engines.mlx.engine import MlxEngine

    return MlxEngine(pick_device(device), remote_code)
