"""The decoder as an .mlpackage: exported, converted, its caches as Core ML states."""

from pathlib import Path

import coremltools

from pippin.targets.decoder import Decoder, Weights
from pippin.targets.exporting import export
from pippin.targets.quiet import quiet


def save(weights: Weights, path: Path) -> None:
    """Write the .mlpackage for iOS 18; it takes 1 to `context` - 1 tokens a call."""
    with quiet():
        program = export(Decoder(weights, every=False), {}, wanted=False)
        package = coremltools.convert(
            program,
            convert_to="mlprogram",
            minimum_deployment_target=coremltools.target.iOS18,
            compute_precision=coremltools.precision.FLOAT16,
            skip_model_load=True,
        )
        package.save(str(path))
