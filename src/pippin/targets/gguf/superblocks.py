"""Nested codes as GGML's super-blocks of 256 weights, the K types, bit for bit.

A super-block has one or two steps in float16, the groups' multiples of them, and the codes, low and
high bits apart (https://github.com/ggml-org/ggml, ggml-common.h). Types of 2, 3 and 6 bits have
groups of 16 weights: two neighbours get the multiple of one of ours.

Shape letters: O outputs, I inputs, G groups of 32, U super-blocks, E a super-block's eight groups,
H its halves of four groups, W weights of a group.
"""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pippin.errors import ModelError
from pippin.quantizers.nested import GROUP, MOST, SUPER, steps
from pippin.targets.folder import Affine

Bytes: TypeAlias = NDArray[np.uint8]
_EIGHT = SUPER // GROUP


def pack_superblocks(name: str, matrix: Affine) -> Bytes:
    """The rows' bytes in the K type of the matrix's bits, (O, bytes).

    Raises ModelError for scales that are no multiples of a step, or a step beyond float16.
    """
    rows, inputs = matrix.codes_OI.shape
    codes_OUEW = matrix.codes_OI.reshape(rows, inputs // SUPER, _EIGHT, GROUP)
    multiples_OUE, steps_OU2 = _split(name, matrix, matrix.scales_OG)
    if matrix.bits in (3, 6):
        lay = _three if matrix.bits == 3 else _six
        parts = [*lay(codes_OUEW, multiples_OUE), steps_OU2]
    else:
        least_OUE, other_OU2 = _split(name, matrix, -matrix.biases_OG)
        lay = {2: _two, 4: _four, 5: _five}[matrix.bits]
        parts = lay(codes_OUEW, multiples_OUE, least_OUE, [steps_OU2, other_OU2])
    return np.concatenate(parts, -1).reshape(rows, -1)


def _split(name: str, matrix: Affine, values_OG: NDArray[np.float32]) -> tuple[Bytes, Bytes]:
    """What each group has of its super-block's step, (O, U, E), and the step's two bytes."""
    rows, inputs = matrix.codes_OI.shape
    values_OG = np.broadcast_to(values_OG, (rows, inputs // GROUP))
    steps_OU = steps(values_OG, MOST[matrix.bits])
    multiples_OUE = values_OG.reshape(*steps_OU.shape, _EIGHT) / steps_OU[..., None]
    with np.errstate(over="ignore"):
        halves_OU = steps_OU.astype(np.float16)
    whole = (multiples_OUE == np.rint(multiples_OUE)).all() and multiples_OUE.min() >= 0
    if not whole or (halves_OU != steps_OU).any():
        raise ModelError(
            f"gguf: scales of {name} are no multiples of a float16 for every {SUPER} weights",
            f'quantize again, or set quantize.keep = ["{name}"]',
        )
    return multiples_OUE.astype(np.uint8), halves_OU[..., None].view(np.uint8)


def _two(
    codes_OUEW: Bytes, multiples_OUE: Bytes, least_OUE: Bytes, ends: list[Bytes]
) -> list[Bytes]:
    both_OUE = multiples_OUE | least_OUE << np.uint8(4)
    return [both_OUE.repeat(2, -1), _pairs(codes_OUEW), *ends]


def _three(codes_OUEW: Bytes, multiples_OUE: Bytes) -> list[Bytes]:
    """Multiples count from -32 in the file: 4 bits of each, then 2 bits of each."""
    signed = (multiples_OUE + np.uint8(32)).repeat(2, -1)
    low, high = signed & np.uint8(15), (signed >> np.uint8(4)).reshape(*signed.shape[:2], 4, 4)
    tails = _joined([high[..., i, :] for i in range(4)], 2)
    heads = low[..., :8] | low[..., 8:] << np.uint8(4)
    return [_bit_of_each(codes_OUEW, 2), _pairs(codes_OUEW), heads, tails]


def _six(codes_OUEW: Bytes, multiples_OUE: Bytes) -> list[Bytes]:
    rows, blocks = codes_OUEW.shape[:2]
    low = (codes_OUEW & np.uint8(15)).reshape(rows, blocks, 2, 2, 2 * GROUP)
    nibbles = _joined([low[..., 0, :], low[..., 1, :]], 4).reshape(rows, blocks, -1)
    return [nibbles, _pairs(codes_OUEW >> np.uint8(4)), multiples_OUE.repeat(2, -1)]


def _four(
    codes_OUEW: Bytes, multiples_OUE: Bytes, least_OUE: Bytes, ends: list[Bytes]
) -> list[Bytes]:
    """Nibbles of two groups that follow each other share bytes."""
    rows, blocks = codes_OUEW.shape[:2]
    low = codes_OUEW & np.uint8(15)
    nibbles = _joined([low[:, :, 0::2], low[:, :, 1::2]], 4).reshape(rows, blocks, -1)
    return [*ends, *_twelve(multiples_OUE, least_OUE), nibbles]


def _five(codes_OUEW: Bytes, *others: Any) -> list[Bytes]:
    """The fifth bits go before the nibbles."""
    *heads, nibbles = _four(codes_OUEW, *others)
    return [*heads, _bit_of_each(codes_OUEW, 4), nibbles]


def _twelve(multiples_OUE: Bytes, least_OUE: Bytes) -> list[Bytes]:
    """Sixteen numbers of 6 bits in 12 bytes: the last four's upper bits lie above the first's."""
    both = multiples_OUE, least_OUE
    heads = [v[..., :4] | (v[..., 4:] >> np.uint8(4)) << np.uint8(6) for v in both]
    return [*heads, _joined([v[..., 4:] & np.uint8(15) for v in both], 4)]


def _pairs(codes_OUEW: Bytes) -> Bytes:
    """The two low bits of every code: four groups of a half share bytes."""
    rows, blocks = codes_OUEW.shape[:2]
    halves_OUHEW = (codes_OUEW & np.uint8(3)).reshape(rows, blocks, 2, 4, GROUP)
    return _joined([halves_OUHEW[:, :, :, i] for i in range(4)], 2).reshape(rows, blocks, -1)


def _bit_of_each(codes_OUEW: Bytes, bit: int) -> Bytes:
    """One bit of every code, (O, U, W): a byte has that of all eight groups."""
    bits_OUEW = codes_OUEW >> np.uint8(bit) & np.uint8(1)
    return np.packbits(bits_OUEW, axis=2, bitorder="little")[:, :, 0]


def _joined(parts: list[Bytes], width: int) -> Bytes:
    """The parts in the same bytes, each `width` bits above the one before."""
    joined = parts[0].copy()
    for i, part in enumerate(parts[1:], 1):
        joined |= part << np.uint8(i * width)
    return joined
