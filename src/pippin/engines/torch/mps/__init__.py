"""MPS's rules on any machine: a program runs on the CPU while every operator is judged as on MPS.

On a Mac the GPU itself is asked (`observer.py`), unless another chip or PyTorch is wanted.

with Simulator(make_rules()) as simulated:
    network.to("mps")(tokens.to("mps"))
simulated.report.offences()
"""

from collections.abc import Iterator
from pathlib import Path

from pippin.check.audits import Ask, Audited
from pippin.quiet import quiet_imports


def model(folder: Path, ask: Ask) -> Iterator[Audited]:
    """The engine's own LoRA step, generation, evaluation and quantized products of a model folder.

    Raises ModelError for a folder whose config.json cannot be read, MpsOffence where `ask.strict`.
    """
    with quiet_imports():
        from pippin.engines.torch.mps.audit import audit_model

        yield from audit_model(folder, ask)


def architectures(ask: Ask) -> Iterator[Audited]:
    """Tiny random models of the most used architectures: two dtypes, training, generation."""
    with quiet_imports():
        from pippin.engines.torch.mps.architectures import audit_all

        yield from audit_all(ask)
