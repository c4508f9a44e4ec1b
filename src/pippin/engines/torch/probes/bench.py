"""What every probe needs: operands on the device, the same numbers exactly, and the gap between.

References are computed in float64 on the CPU, whatever the device.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pippin.check import Case, Fallback, Probe, Shapes

FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Largest error, relative to the largest value, that rounding explains.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


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


Measure = Callable[..., Iterator[Case]]


def exact(tensor: Tensor) -> Tensor:
    """The same numbers in float64 on the CPU, apart from the original's history."""
    return tensor.detach().cpu().to(torch.float64)


def gap(out: Tensor, wanted: Tensor) -> float:
    """Largest difference as a share of the largest value wanted; infinite for another shape."""
    if out.shape != wanted.shape:
        return float("inf")
    scale = exact(wanted).abs().max().clamp(min=1e-30)
    return float((exact(out) - exact(wanted)).abs().max() / scale)


def unequal(out: Tensor, wanted: Tensor) -> float:
    """Share of elements that are not the same number; NaN equals NaN."""
    if out.shape != wanted.shape:
        return float("inf")
    same = torch.isclose(exact(out), exact(wanted), 0.0, 0.0, equal_nan=True)
    return 1.0 - same.double().mean().item()


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Probes that differ by dtype alone: `name.dtype`, each with that dtype's tolerance."""

    name: str
    measure: Measure
    remedy: str
    avoid: Fallback = ""
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    tolerance: float | None = None

    def probes(self, bench: Bench) -> Iterator[Probe]:
        """One probe a dtype."""
        for name in self.dtypes:
            dtype = FLOATS[name]
            yield Probe(
                name=f"{self.name}.{name}",
                tolerance=TOLERANCE[dtype] if self.tolerance is None else self.tolerance,
                cases=functools.partial(self.measure, bench, dtype),
                remedy=self.remedy,
                avoid=self.avoid,
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Single:
    """One probe with a tolerance of its own."""

    name: str
    measure: Measure
    remedy: str
    avoid: Fallback = ""
    tolerance: float = 0.0

    def probes(self, bench: Bench) -> Iterator[Probe]:
        """The probe."""
        yield Probe(
            name=self.name,
            tolerance=self.tolerance,
            cases=functools.partial(self.measure, bench),
            remedy=self.remedy,
            avoid=self.avoid,
        )
