"""Codes and scales as GGML's blocks of 32 weights, bit for bit.

A block begins with its scale, and its minimum where it has one, in float16; codes of 4 bits follow
with weight i in the low and weight i + 16 in the high half of byte i, the fifth bits before them in
one word (https://github.com/ggml-org/ggml, ggml-common.h).

Shape letters: O outputs, I inputs, G groups, N blocks of a row, B weights of a block.
"""

from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from pippin.errors import ModelError
from pippin.targets.folder import Affine

BLOCK = 32
_SYMMETRIC = {2: "Q4_0", 3: "Q4_0", 4: "Q4_0", 5: "Q5_0", 6: "Q8_0", 8: "Q8_0"}
_AFFINE = {2: "Q4_1", 3: "Q4_1", 4: "Q4_1", 5: "Q5_1"}
_BITS = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8}


def block_type(bits: int, symmetric: bool, nested: bool = False) -> str:
    """The smallest of GGML's types that holds such codes exactly; "" where there is none."""
    if nested:
        return f"Q{bits}_K"
    return (_SYMMETRIC if symmetric else _AFFINE).get(bits, "")


def type_bits(kind: str) -> float:
    """Bits of a weight in a type, what its block has beside the codes counted."""
    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return 8 * size / weights


def pack_blocks(name: str, matrix: Affine) -> NDArray[np.uint8]:
    """The rows' bytes in the type that `block_type` gives, (O, bytes).

    Raises ModelError for scales that float16 would round.
    """
    rows, inputs = matrix.codes_OI.shape
    symmetric, bits = matrix.symmetric, matrix.bits
    stored_bits = _BITS[block_type(bits, symmetric)]
    codes_OI, neutral = matrix.codes_OI, 2 ** (bits - 1) if symmetric else 0
    heads = [_halves(name, _used_scales(matrix, neutral), inputs)]
    if symmetric:
        # GGML's symmetric codes count from the middle of its own range.
        codes_OI = codes_OI + np.uint8(2 ** (stored_bits - 1) - neutral)
    else:
        heads.append(_halves(name, matrix.biases_OG, inputs))
    body = _body(codes_OI.reshape(rows, inputs // BLOCK, BLOCK), stored_bits)
    return np.concatenate([*heads, *body], -1).reshape(rows, -1)


def _used_scales(matrix: Affine, neutral: int) -> NDArray[np.float32]:
    """The scales, 0 for a group of nothing but neutral codes: an empty row's is too small."""
    rows, groups = matrix.scales_OG.shape
    unused_OG = (matrix.codes_OI.reshape(rows, groups, -1) == neutral).all(-1)
    return np.where(unused_OG, np.float32(0), matrix.scales_OG)


def _halves(name: str, values_OG: NDArray[np.float32], inputs: int) -> NDArray[np.uint8]:
    """A value for each block of a row, as the two bytes of a float16: (O, N, 2)."""
    with np.errstate(over="ignore"):
        halves_OG = values_OG.astype(np.float16)
    rounded = int((halves_OG.astype(np.float32) != values_OG).sum())
    if rounded:
        raise ModelError(
            f"gguf: {rounded} of {values_OG.size} group scales of {name} are no float16, "
            "which GGUF stores",
            f'set quantize.keep = ["{name}"]: its weights are too small or too large',
        )
    rows, groups = values_OG.shape
    blocks_ON = np.repeat(halves_OG, inputs // BLOCK // groups, axis=1)
    return blocks_ON.view(np.uint8).reshape(rows, -1, 2)


def _body(codes_ONB: NDArray[np.uint8], bits: int) -> list[NDArray[Any]]:
    if bits == 8:
        return [codes_ONB ^ np.uint8(128)]
    low_ONB = codes_ONB & np.uint8(15)
    nibbles = low_ONB[..., : BLOCK // 2] | low_ONB[..., BLOCK // 2 :] << np.uint8(4)
    if bits == 4:
        return [nibbles]
    return [np.packbits(codes_ONB >> np.uint8(4), axis=-1, bitorder="little"), nibbles]
