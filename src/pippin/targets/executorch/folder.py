"""A folder's codes as XNNPACK holds them: signed and symmetric, or the reason why it cannot.

Shape letters: O outputs (or vocabulary), D inputs, G groups.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pippin.errors import ModelError
from pippin.targets.executorch.constraint import GROUP_MULTIPLE
from pippin.targets.folder import Folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Codes:
    """A symmetric matrix: value = codes * scales, codes int8 (O, D), scales float32 (O, G).

    A scale that is the same in all groups of every row is stored once: G is then 1.
    """

    codes_OD: Tensor
    scales_OG: Tensor
    bits: int


def signed_codes(folder: Folder, module: str) -> Codes:
    """The module's codes and scales, bit for bit. Raises ModelError if not symmetric."""
    found = folder.affine(module)
    if found.bits not in (4, 8):
        raise ModelError(
            f"{module} has {found.bits}-bit codes, XNNPACK holds 4 and 8", "quantize with bits = 4"
        )
    if not found.symmetric:
        raise ModelError(
            f"{module} is quantized with zero points, XNNPACK holds symmetric codes only",
            'quantize with scheme = "symmetric" and embed_scheme = "symmetric"',
        )
    return Codes(
        codes_OD=torch.from_numpy(found.signed),
        scales_OG=torch.from_numpy(found.scales_OG),
        bits=found.bits,
    )


def linear_codes(folder: Folder, module: str) -> Codes:
    """Codes of a linear, in a form XNNPACK multiplies. Raises ModelError for any other."""
    found = signed_codes(folder, module)
    if found.bits == 8:
        _require_channels(module, found)
    else:
        _require_blocks(module, found)
    return found


def _require_channels(module: str, found: Codes) -> None:
    if found.scales_OG.shape[1] != 1:
        raise ModelError(
            f"{module}: 8-bit codes with a scale a group, XNNPACK takes one scale a channel",
            "quantize 8-bit linears and tied heads with group_size = 0",
        )


def _require_blocks(module: str, found: Codes) -> None:
    inputs, groups = found.codes_OD.shape[1], found.scales_OG.shape[1]
    if inputs % groups or inputs // groups % GROUP_MULTIPLE:
        raise ModelError(
            f"{module}: 4-bit groups of {inputs / groups:g} over {inputs} inputs, "
            f"XNNPACK takes multiples of {GROUP_MULTIPLE}",
            f"quantize with group_size = {GROUP_MULTIPLE}, or keep this tensor dense",
        )
    # XNNPACK stores block scales in bfloat16: more precision would be lost without a word.
    if not torch.equal(found.scales_OG.bfloat16().float(), found.scales_OG):
        raise ModelError(
            f"{module}: group scales have more precision than bfloat16, which XNNPACK stores",
            "start from a bfloat16 model: scales have its dtype",
        )
