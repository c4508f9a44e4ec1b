"""Which codes a target holds, of those that hold symmetric ones of some widths in any groups."""

from collections.abc import Iterator, Sequence

from pippin.recipe import Quantize
from pippin.targets import Refusal


def refuse_grids(target: str, quantize: Quantize, widths: Sequence[int]) -> Iterator[Refusal]:
    """Every reason why codes made this way do not fit, as (message, hint)."""
    parts = (
        ("linears", "", quantize.bits, quantize.scheme),
        ("embedding", "embed_", quantize.embed_bits, quantize.embed_scheme),
    )
    *few, last = map(str, widths)
    listed = f"{', '.join(few)} or {last}"
    for what, prefix, bits, scheme in parts:
        if bits == 16:
            continue
        if bits not in widths:
            yield (
                f"{target}: {what} have codes of {listed} bits, not {bits}",
                f"set quantize.{prefix}bits = {listed}",
            )
        if scheme != "symmetric":
            yield (
                f"{target}: {what} have symmetric codes, the recipe asks for {scheme}",
                f'set quantize.{prefix}scheme = "symmetric"',
            )
