"""ExecuTorch with its Vulkan delegate: a .pte for the GPUs of Android phones.

parts.py        linears, norms and attention in the forms that Vulkan has shaders for
delegate.py     lowering, and what the bundle says
"""

from pathlib import Path

from pippin.recipe import Quantize
from pippin.targets import Refusal
from pippin.targets.executorch.delegated_target import DelegatedTarget

BITS = (4, 8)


class ExecuTorchVulkan(DelegatedTarget):
    """Its linears have 4 bits, embedding and head 8 too."""

    def refusal(self, quantize: Quantize, checkpoint: Path) -> Refusal | None:
        """The first reason against deploying such a model, as (message, hint); None for none."""
        found = super().refusal(quantize, checkpoint)
        if found or quantize.bits != 8:
            return found
        return (
            "executorch-vulkan: Vulkan multiplies 4-bit codes; 8-bit ones it would expand at every "
            "token",
            "set quantize.bits = 4",
        )


def make_target() -> ExecuTorchVulkan:
    """The target's entry in the table."""
    return ExecuTorchVulkan(name="executorch-vulkan", bits=BITS)
