"""Lowers the decoder for the Core ML delegate, and says how to run what comes out."""

from typing import Any

import coremltools
import torch
from executorch.backends.apple.coreml.compiler import CoreMLBackend
from executorch.backends.apple.coreml.partition import CoreMLPartitioner
from executorch.exir import EdgeProgramManager

from pippin.targets.agreement import Effort
from pippin.targets.decoder import Weights
from pippin.targets.executorch import lowering
from pippin.targets.executorch.coreml.parts import CoreMlDelegateParts
from pippin.targets.executorch.coreml.runtime import EmbeddedModel
from pippin.targets.executorch.delegated import Delegate
from pippin.targets.executorch.guide import differs, on_apple
from pippin.targets.gate import Limits
from pippin.targets.guide import Guide


def delegate() -> Delegate:
    """Core ML: the whole program in one piece, or an error."""
    return Delegate(
        backend="coreml",
        runtime="its Core ML program in numpy, rounded to float16: Core ML itself was not run",
        # Activations are rounded to float16 after every operator.
        limits=Limits(
            target="executorch-coreml",
            max_kl=0.01,
            min_top1=0.9,
            effort=Effort(stepped=1, whole=False),
        ),
        full_calls=False,
        read_weights=lambda folder, context: Weights(CoreMlDelegateParts(), folder, context),
        lower=_lower,
        open=EmbeddedModel,
        why="coremltools converts no such operator",
        guide=_guide,
    )


def _lower(program: torch.export.ExportedProgram, constants: dict[str, Any]) -> EdgeProgramManager:
    specs = CoreMLBackend.generate_compile_specs(
        minimum_deployment_target=coremltools.target.iOS18,
        compute_precision=coremltools.precision.FLOAT16,
        compute_unit=coremltools.ComputeUnit.ALL,
    )
    # The delegate looks for the order of dimensions in its own operators.
    partitioner = CoreMLPartitioner(compile_specs=specs)
    return lowering.lower(program, constants, partitioner, skip_dim_order=False)


def _guide(description: dict[str, Any]) -> Guide:
    return Guide(
        title="A language model for ExecuTorch with Core ML",
        about="`model.pte` gives its whole program to Core ML, which chooses between CPU, GPU and "
        "Neural Engine on iOS 18, macOS 15 and newer. That program, read back and run operator by "
        f"operator in float16, {differs(description['check'])} Core ML itself was not run: it "
        "needs a Mac or a phone.",
        run=on_apple(description["versions"]["executorch"], "COREML"),
    )
