"""What ExecuTorch with XNNPACK can hold, checked before anything is trained or quantized."""

from collections.abc import Iterator
from pathlib import Path

from pippin.model import names
from pippin.model.config import read_config
from pippin.model.weights import Checkpoint
from pippin.recipe import Quantize
from pippin.targets import Refusal

GROUP_MULTIPLE = 32


def refuse_quantize(quantize: Quantize, tied: bool) -> Iterator[Refusal]:
    """Every reason why codes made this way cannot be stored in a .pte, as (message, hint)."""
    if quantize.scheme != "symmetric":
        yield (
            f"executorch: XNNPACK holds symmetric codes, the recipe asks for {quantize.scheme}",
            'set quantize.scheme = "symmetric"',
        )
    # Under a budget every linear gets bits that are held; quantize asks for each.
    if quantize.budget is None:
        yield from _refuse_linears(quantize.bits, quantize.group_size)
    if quantize.embed_bits != 16:
        yield from _refuse_embedding(quantize, tied)


def _refuse_linears(bits: int, group_size: int) -> Iterator[Refusal]:
    if bits not in (4, 8):
        yield (
            f"executorch: XNNPACK has no {bits}-bit linear, only 4 and 8 bits",
            "set quantize.bits = 4",
        )
    if bits == 8 and group_size != 0:
        yield (
            f"executorch: an 8-bit linear has one scale a channel, not groups of {group_size}",
            "set quantize.group_size = 0",
        )


def _refuse_embedding(quantize: Quantize, tied: bool) -> Iterator[Refusal]:
    if quantize.embed_scheme != "symmetric":
        yield (
            "executorch: the embedding holds symmetric codes only, "
            f"the recipe asks for {quantize.embed_scheme}",
            'set quantize.embed_scheme = "symmetric"',
        )
    if quantize.embed_bits not in (4, 8):
        yield (
            f"executorch: embeddings have 4, 8 or 16 bits, not {quantize.embed_bits}",
            "set quantize.embed_bits = 8",
        )
    if quantize.embed_bits == 8 and quantize.embed_group_size != 0:
        which = "the tied head" if tied else "the head"
        yield (
            f"executorch: {which} is an 8-bit linear with one scale a channel, "
            f"not groups of {quantize.embed_group_size}",
            "set quantize.embed_group_size = 0",
        )


def refuse_scales(quantize: Quantize, checkpoint: Path) -> Iterator[Refusal]:
    """The reason why a 4-bit grid of these weights loses precision: scales have their dtype."""
    if quantize.bits != 4 or read_config(checkpoint).quantization:
        return
    tensors = Checkpoint(checkpoint).tensors
    linears = (info for name, info in tensors.items() if names.is_linear(name, info.shape))
    found = {info.dtype.name for info in linears} - {"bfloat16"}
    if found:
        yield (
            f"executorch: XNNPACK stores the scales of 4-bit groups in bfloat16, this model's "
            f"weights and so its scales are {min(found)}",
            "start from a bfloat16 model, or set quantize.bits = 8 and quantize.group_size = 0",
        )
