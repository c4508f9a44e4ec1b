"""The Core ML target's parts, over codes in the form that its ExecuTorch delegate keeps."""

from torch import nn

from pippin.targets.coreml import BITS
from pippin.targets.coreml.parts import HalfNorm
from pippin.targets.executorch.affine import Matrix, require_grid
from pippin.targets.folder import Affine
from pippin.targets.matrices import MatrixParts


class CoreMlDelegateParts(MatrixParts):
    """Parts over symmetric codes; see targets.decoder.Parts."""

    norm = HalfNorm

    def quantized(self, name: str, found: Affine) -> nn.Module:
        """Raises ModelError for codes that Core ML does not hold."""
        require_grid("executorch-coreml", name, found, BITS)
        return Matrix(found)
