"""The decoder's parts in forms that ExecuTorch's Vulkan delegate has shaders for.

Caches and attention are ExecuTorch's own operators, which the delegate takes over.
"""

from torch import nn

from pippin.targets.executorch.affine import Matrix, require_grid
from pippin.targets.executorch.parts import Cache, Place
from pippin.targets.executorch.vulkan import BITS
from pippin.targets.folder import Affine
from pippin.targets.matrices import MatrixParts
from pippin.targets.shape import Shape


class VulkanParts(MatrixParts):
    """Parts over symmetric codes; see targets.decoder.Parts."""

    def place(self, shape: Shape, start: int, length: int, window: int | None) -> Place:
        """The first slot: the caches' operators mask themselves."""
        assert window is None
        return start, None

    def cache(self, shape: Shape) -> nn.Module:  # ty: ignore[incompatible-method-override]
        """ExecuTorch's own."""
        return Cache(shape)

    def quantized(self, name: str, found: Affine) -> nn.Module:
        """Raises ModelError for codes that the delegate does not hold."""
        require_grid("executorch-vulkan", name, found, BITS)
        return Matrix(found)
