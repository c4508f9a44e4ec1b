"""The decoder as an .mlpackage: exported, converted, its caches as Core ML states."""

import shutil
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
    float16. Raises OSError where the disk is full.
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
        # Its own way of saving turns the reason of a failure, a full disk, into text.
        made = Path(package.package_path)
        if path.exists():
            shutil.rmtree(path)
        for file in (file for file in made.rglob("*") if file.is_file()):
            copy = path / file.relative_to(made)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)


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
