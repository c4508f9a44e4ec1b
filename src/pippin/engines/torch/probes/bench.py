"""What every probe needs: operands on the device, the same numbers exactly, and the gap between.

References are computed in float64 on the CPU, whatever the device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pippin.check import Shapes, families

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """The device under test and the sizes the work will have."""

    device: torch.device
    shapes: Shapes

    def draw(self, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
        """Normal numbers, the same on every device."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=generator).to(dtype).to(self.device)

    def put(self, tensor: Tensor) -> Tensor:
        """The tensor on the device."""
        return tensor.to(self.device)


def exact(tensor: Tensor) -> Tensor:
    """The same numbers in float64 on the CPU, apart from the original's history."""
    return tensor.detach().cpu().to(torch.float64)


def gap(out: Tensor, wanted: Tensor) -> float:
    """Largest difference as a share of the largest value wanted; infinite for another shape."""
    return families.gap(exact(out).numpy(), exact(wanted).numpy())


def unequal(out: Tensor, wanted: Tensor) -> float:
    """Share of elements that are not the same number; NaN equals NaN."""
    return families.unequal(exact(out).numpy(), exact(wanted).numpy())
