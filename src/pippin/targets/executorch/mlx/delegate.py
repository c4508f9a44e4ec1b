"""Lowers the decoder for the MLX delegate, and says how to run what comes out."""

from pathlib import Path
from typing import Any

import torch
from executorch.exir import EdgeProgramManager

from pippin.engines import Scorer
from pippin.targets.agreement import Effort
from pippin.targets.decoder import Weights
from pippin.targets.executorch import lowering
from pippin.targets.executorch.delegated import Delegate
from pippin.targets.executorch.guide import differs, on_apple
from pippin.targets.executorch.mlx.schema import provide_schema
from pippin.targets.folder import Folder
from pippin.targets.gate import Limits
from pippin.targets.guide import Guide
from pippin.targets.quiet import quiet


def delegate() -> Delegate:
    """MLX: the whole program in one piece, or an error."""
    return Delegate(
        backend="mlx",
        runtime="its MLX bytecode in PyTorch, in float32: MLX itself was not run",
        # The same codes and float32 on both sides.
        limits=Limits(
            target="executorch-mlx",
            max_kl=1e-4,
            min_top1=0.98,
            effort=Effort(stepped=1, whole=False),
        ),
        full_calls=True,
        read_weights=_read_weights,
        lower=_lower,
        open=_open,
        why="no instruction of the MLX delegate computes it",
        guide=_guide,
    )


def _read_weights(folder: Folder, context: int) -> Weights:
    provide_schema()
    from pippin.targets.executorch.mlx.parts import read_weights

    return read_weights(folder, context)


def _lower(program: torch.export.ExportedProgram, constants: dict[str, Any]) -> EdgeProgramManager:
    from executorch.backends.mlx import MLXPartitioner
    from executorch.backends.mlx.passes import get_default_passes

    # Imported just now, the delegate has set its logger to tell everything.
    with quiet(), lowering.without_idle_passes():
        return lowering.lower(program, constants, MLXPartitioner(), get_default_passes())


def _open(path: Path, context: int) -> Scorer:
    provide_schema()
    from pippin.targets.executorch.mlx.runtime import BytecodeModel

    return BytecodeModel(path, context)


def _guide(description: dict[str, Any]) -> Guide:
    return Guide(
        title="A language model for ExecuTorch on Apple GPUs",
        about="`model.pte` runs on the GPUs of Macs, iPhones and iPads through ExecuTorch's MLX "
        "delegate, which has the whole model in one piece. Its bytecode, run instruction by "
        f"instruction in PyTorch in float32, {differs(description['check'])} MLX itself was not "
        "run: it needs a Mac.",
        run=on_apple(description["versions"]["executorch"], "MLX"),
    )
