"""Ways to choose the codes of a tensor; every one writes the same layout.

Shape letters: O output features, I input features, G groups.
"""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pippin.quantizers.hessian import Hessian

QUANTIZERS = {
    "awq": "pippin.quantizers.awq",
    "best": "pippin.quantizers.best",
    "gptq": "pippin.quantizers.gptq",
    "hqq": "pippin.quantizers.hqq",
    "mse": "pippin.quantizers.mse",
    "rtn": "pippin.quantizers.rtn",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What a method asks for that rounds under the Hessian of a linear's inputs.

    `without` rounds a tensor whose inputs nobody saw. `scaled`: inputs are scaled beforehand, see
    stages/folding.py. `by_loss`: a token may weigh what it does to the predictions.
    """

    without: str
    scaled: bool = False
    by_loss: bool = False


CALIBRATED = {
    "awq": Needs(without="rtn", scaled=True),
    "best": Needs(without="mse", by_loss=True),
    "gptq": Needs(without="rtn"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """How one tensor is cut up: value = code * scale + bias, a scale and a bias for each group.

    `nested` grids have scales of scales, see nested.py.
    """

    bits: int
    group_size: int
    symmetric: bool
    per_channel: bool = False
    nested: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Codes:
    """One quantized tensor, unpacked: codes (O, I) uint8, scales and biases (O, G) as stored."""

    codes_OI: NDArray[np.uint8]
    scales_OG: NDArray[Any]
    biases_OG: NDArray[Any]


class Quantizer(Protocol):
    """One method."""

    def quantize(
        self,
        weight_OI: NDArray[Any],
        grid: Grid,
        dtype: np.dtype[Any],
        hessian: "Hessian | None" = None,
    ) -> Codes:
        """Codes for some rows of a weight, scales and biases rounded to `dtype` before rounding.

        `hessian` of the weight's inputs is for the methods in CALIBRATED, which need it.
        """
        ...


def load_quantizer(name: str) -> Quantizer:
    """The method behind a name of QUANTIZERS."""
    return cast("Quantizer", importlib.import_module(QUANTIZERS[name]).make_quantizer())
