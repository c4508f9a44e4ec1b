"""The Core ML package inside a .pte as a Scorer, run operator by operator in numpy."""

import tempfile
from pathlib import Path

from executorch.backends.apple.coreml import executorchcoreml
from executorch.exir._serialize._program import _extract_delegate_payload

from pippin.errors import ModelError
from pippin.targets.coreml.runtime import PackageModel

_BACKEND, _PACKAGE = "CoreMLBackend", "lowered_module/model.mlpackage"


class EmbeddedModel(PackageModel):
    """A deployed file as a Scorer; its first and only delegate has the whole program."""

    def __init__(self, path: Path, context: int) -> None:
        payload = _extract_delegate_payload(path.read_bytes(), _BACKEND)
        with tempfile.TemporaryDirectory() as place:
            if payload is None or not executorchcoreml.unflatten_directory_contents(payload, place):
                raise ModelError(f"{path} holds no Core ML package", "deploy again: --redo deploy")
            super().__init__(Path(place) / _PACKAGE, context)
