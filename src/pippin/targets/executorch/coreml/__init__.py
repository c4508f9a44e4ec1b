"""ExecuTorch with its Core ML delegate: a .pte whose program Core ML runs, from iOS 18 on.

parts.py        the parts of the Core ML target, over codes as torchao writes them
runtime.py      the package inside the .pte as a Scorer
delegate.py     lowering, and what the bundle says
"""

from pippin.targets.coreml import BITS
from pippin.targets.executorch.delegated_target import DelegatedTarget


def make_target() -> DelegatedTarget:
    """The target's entry in the table."""
    return DelegatedTarget(name="executorch-coreml", bits=BITS)
