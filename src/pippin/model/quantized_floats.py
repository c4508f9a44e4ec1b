"""MLX's floating-point layouts: small floats packed into uint32, a small float as a group's scale.

A module holds `weight` (O, I * bits / 32) uint32 and `scales` (O, G) uint8; a weight is code times
scale, both exact in bfloat16
(https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.quantize.html).

Shape letters: O output features, I input features, G groups, P packed words.
"""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pippin.errors import ModelError


@dataclass(frozen=True, kw_only=True, slots=True)
class Floats:
    """The formats of a mode's codes and scales."""

    bits: int
    group_size: int
    code: Any
    scale: Any


MODES = {
    "mxfp4": Floats(
        bits=4, group_size=32, code=ml_dtypes.float4_e2m1fn, scale=ml_dtypes.float8_e8m0fnu
    ),
    "nvfp4": Floats(
        bits=4, group_size=16, code=ml_dtypes.float4_e2m1fn, scale=ml_dtypes.float8_e4m3fn
    ),
    "mxfp8": Floats(
        bits=8, group_size=32, code=ml_dtypes.float8_e4m3fn, scale=ml_dtypes.float8_e8m0fnu
    ),
}


def find_floats(module: str, entry: dict[str, Any]) -> Floats | None:
    """The layout that a module's entry in `quantization` names; None for affine.

    Raises ModelError for a mode that MLX does not have, or has with other bits and groups.
    """
    mode = entry.get("mode", "affine")
    if mode == "affine":
        return None
    floats = MODES.get(mode)
    if floats is None or (floats.bits, floats.group_size) != (entry["bits"], entry["group_size"]):
        raise ModelError(
            f"{module} is quantized as {mode} with {entry['bits']} bits in groups of "
            f"{entry['group_size']}; pippin reads affine, {', '.join(MODES)} as MLX writes them",
            "start from the dense model",
        )
    return floats


def dequantize_floats(
    codes_OI: NDArray[np.uint8], scales_OG: NDArray[np.uint8], floats: Floats
) -> NDArray[np.float32]:
    """code * scale in float32, (O, I)."""
    values = codes_OI.view(floats.code).astype(np.float32)
    scales = scales_OG.view(floats.scale).astype(np.float32)
    return (values.reshape(*scales.shape, -1) * scales[..., None]).reshape(codes_OI.shape)
