"""What ExecuTorch's MLX delegate can hold, checked before anything is trained or quantized."""

from collections.abc import Iterator

from pippin.recipe import Quantize
from pippin.targets import Refusal

BITS = (2, 4, 5, 6, 8)


def refuse_quantize(quantize: Quantize) -> Iterator[Refusal]:
    """Every reason why codes made this way cannot be stored in a .pte, as (message, hint)."""
    parts = (
        ("linears", "", quantize.bits, quantize.scheme),
        ("embedding", "embed_", quantize.embed_bits, quantize.embed_scheme),
    )
    for what, prefix, bits, scheme in parts:
        if bits == 16:
            continue
        if bits not in BITS:
            widths = ", ".join(map(str, BITS))
            yield (
                f"executorch-mlx: {what} have codes of {widths} bits, not {bits}",
                f"set quantize.{prefix}bits to one of these",
            )
        if scheme != "symmetric":
            yield (
                f"executorch-mlx: {what} have symmetric codes, the recipe asks for {scheme}",
                f'set quantize.{prefix}scheme = "symmetric", or deploy to `mlx`, which holds both',
            )
