"""A .pte in ExecuTorch's own runtime: tokens in, floats out.

Shape letters: B batch, T tokens, V vocab.
"""

from collections.abc import Sequence
from pathlib import Path

# These define the operators that a .pte calls beside XNNPACK.
import executorch.extension.llm.custom_ops.custom_ops
import executorch.kernels.quantized  # noqa: F401
import numpy as np
import torch
from executorch.runtime import Runtime
from numpy.typing import NDArray

from pippin.targets.native_log import without_harmless_lines
from pippin.targets.stepping import SteppingModel


class PteModel(SteppingModel):
    """A deployed file as a Scorer."""

    def __init__(self, path: Path, context: int) -> None:
        super().__init__(context)
        with without_harmless_lines():
            self._program = Runtime.get().load_program(path)
            forward = self._program.load_method("forward")
        assert forward is not None, "every bundle has a forward method"
        self._forward = forward

    def last_logits(self, tokens: Sequence[int], start: int) -> NDArray[np.float32]:
        """Logits after the last of some tokens, (V,); see SteppingModel."""
        self.require_room(start + len(tokens))
        ids_BT = torch.tensor([[int(token) for token in tokens]], dtype=torch.long)
        position = torch.tensor([start], dtype=torch.long)
        with without_harmless_lines():
            (logits_BV,) = self._forward.execute((ids_BT, position))
        # The runtime writes the next call's output into the same memory.
        return logits_BV[0].numpy().copy()
