"""The decoder as an .mlpackage: exported, converted, its caches as Core ML states."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import coremltools

from pippin.targets.decoder import Decoder, Weights
from pippin.targets.exporting import export
from pippin.targets.quiet import quiet


def save(weights: Weights, path: Path, wide: Collection[str] = ()) -> None:
    """Write the .mlpackage for iOS 18; it takes 1 to `context` - 1 tokens a call.

    Operators named in `wide` compute in float32, and so do those that read them; the others in
    float16.
    """
    with quiet():
        program = export(Decoder(weights, every=False), {}, wanted=False)
        package = coremltools.convert(
            program,
            convert_to="mlprogram",
            minimum_deployment_target=coremltools.target.iOS18,
            compute_precision=coremltools.transform.FP16ComputePrecision(_narrow(wide)),
            skip_model_load=True,
        )
        package.save(str(path))


def _narrow(wide: Collection[str]) -> Callable[[Any], bool]:
    """Which operators may be float16."""

    def narrow(operation: Any) -> bool:
        read = (value for given in operation.inputs.values() for value in _values(given))
        producers = {value.op.name for value in read if value.op is not None}
        return not ({operation.name} | producers) & set(wide)

    return narrow


def _values(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]
