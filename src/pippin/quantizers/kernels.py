"""The passes that rounding makes over all weights, in C++; where it does not compile, in numpy.

Callers ask `fit` first and have the same in numpy: codes, scales and biases are equal to the bit.

Shape letters: O output features, I input features, G groups, S weights that share a scale.
"""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pippin.compiled import Compiled

TAILS = {
    np.dtype(np.float32): "_float",
    np.dtype(ml_dtypes.bfloat16): "_bf16",
    np.dtype(np.float16): "_half",
}
PASSES = {"extremes": "pppli", "nearest": "pppplif", "finer": "pppplif", "errors": "pppppli"}
PACKED = (2, 3, 4, 5, 6)  # bits; codes of eight are packed as they are
LANES = 32  # as in the source
COMPILED = Compiled(
    source=Path(__file__).with_suffix(".cpp"),
    flags="-ffp-contract=off",
    signatures={name + tail: PASSES[name] for name in PASSES for tail in TAILS.values()}
    | {f"pack_{bits}": "ppl" for bits in PACKED},
)


def missing() -> str | None:
    """Why there are no kernels here, in words; None where there are. Compiles them if need be."""
    return COMPILED.missing


def fit(groups_OGS: NDArray[Any]) -> bool:
    """Whether there are kernels, and for such groups."""
    known = groups_OGS.dtype in TAILS and groups_OGS.flags.c_contiguous
    return known and groups_OGS.shape[-1] % LANES == 0 and missing() is None


def extremes(groups_OGS: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The least and the largest weight of every group, each (O, G)."""
    low_OG, high_OG = (np.empty(groups_OGS.shape[:2], np.float32) for _ in range(2))
    _run("extremes", groups_OGS, low_OG, high_OG)
    return low_OG, high_OG


def nearest(
    groups_OGS: NDArray[Any], grids: tuple[NDArray[np.float32], NDArray[np.float32]], bits: int
) -> NDArray[np.uint8]:
    """Every weight's nearest code, (O, G, S)."""
    codes_OGS = np.empty(groups_OGS.shape, np.uint8)
    _run("nearest", groups_OGS, *grids, codes_OGS, last=(2**bits - 1,))
    return codes_OGS


def finer(
    groups_OGS: NDArray[Any], fine_OG: NDArray[np.float32], wide_OG: NDArray[np.float32], bits: int
) -> NDArray[np.bool_]:
    """Where the fine scale of a symmetric grid leaves less squared error than the wide one."""
    finer_OG = np.empty(fine_OG.shape, np.bool_)
    _run("finer", groups_OGS, fine_OG, wide_OG, finer_OG, last=(2 ** (bits - 1),))
    return finer_OG


def errors(
    groups_OGS: NDArray[Any],
    codes_OI: NDArray[np.uint8],
    grids: tuple[NDArray[np.float32], NDArray[np.float32]],
) -> tuple[float, float, float]:
    """Squares of errors and of weights, each summed, and the largest error."""
    sums = np.zeros(3)
    _run("errors", groups_OGS, codes_OI, *grids, sums)
    noise, signal, largest = sums.tolist()
    return noise, signal, largest


def pack(codes_OI: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Codes of a width in PACKED, (O, I), as (O, I * bits / 32)."""
    assert codes_OI.flags.c_contiguous
    packed = np.empty((len(codes_OI), codes_OI.shape[1] * bits // 32), "<u4")
    function = getattr(COMPILED.library, f"pack_{bits}")
    function(codes_OI.ctypes.data, packed.ctypes.data, codes_OI.size)
    return packed


def _run(name: str, groups_OGS: NDArray[Any], *arrays: NDArray[Any], last: tuple = ()) -> None:
    assert all(array.flags.c_contiguous for array in arrays), name
    function = getattr(COMPILED.library, name + TAILS[groups_OGS.dtype])
    places = [array.ctypes.data for array in (groups_OGS, *arrays)]
    rows, groups, size = groups_OGS.shape
    function(*places, rows * groups, size, *last)
