"""ExecuTorch with its MLX delegate: a .pte for the GPUs of Macs and iPhones.

schema.py       the delegate's generated files, which Linux wheels lack
parts.py        linears, norms and attention in operators that MLX has kernels for
operators.py    the delegate's instructions in PyTorch
runtime.py      the .pte as a Scorer
delegate.py     lowering, and what the bundle says
"""

from collections.abc import Iterator
from pathlib import Path

from pippin.engines import Scorer
from pippin.events import Event
from pippin.recipe import Quantize
from pippin.targets import Bundle, Refusal
from pippin.targets.families import refuse_family
from pippin.targets.grids import refuse_grids
from pippin.targets.quiet import quiet

BITS = (2, 4, 5, 6, 8)


class ExecuTorchMlx:
    """The target; its packages are imported when it writes or loads."""

    def refusal(self, quantize: Quantize, checkpoint: Path) -> Refusal | None:
        """The first reason against deploying such a model, as (message, hint); None for none."""
        reasons = [
            *refuse_family("executorch-mlx", checkpoint),
            *refuse_grids("executorch-mlx", quantize, BITS),
        ]
        return reasons[0] if reasons else None

    def write(self, bundle: Bundle) -> Iterator[Event]:
        """Make, describe and check the bundle. Raises what delegated.write raises."""
        with quiet():
            from pippin.targets.executorch import delegated
            from pippin.targets.executorch.mlx.delegate import delegate

        yield from delegated.write(delegate(), bundle)

    def load(self, folder: Path) -> Scorer:
        """The .pte's bytecode in PyTorch: not MLX itself. ModelError for an incomplete bundle."""
        with quiet():
            from pippin.targets.executorch import delegated
            from pippin.targets.executorch.mlx.delegate import delegate

        return delegated.load(delegate(), folder)


def make_target() -> ExecuTorchMlx:
    """The target's entry in the table."""
    return ExecuTorchMlx()
