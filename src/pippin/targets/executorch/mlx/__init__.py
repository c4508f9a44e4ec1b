"""ExecuTorch with its MLX delegate: a .pte for the GPUs of Macs and iPhones.

schema.py       the delegate's generated files, which Linux wheels lack
parts.py        linears, norms and attention in operators that MLX has kernels for
operators.py    the delegate's instructions in PyTorch
runtime.py      the .pte as a Scorer
delegate.py     lowering, and what the bundle says
"""

from pippin.targets.executorch.delegated_target import DelegatedTarget

BITS = (2, 4, 5, 6, 8)


def make_target() -> DelegatedTarget:
    """The target's entry in the table."""
    return DelegatedTarget(name="executorch-mlx", bits=BITS)
