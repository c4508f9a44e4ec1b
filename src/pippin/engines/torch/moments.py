"""X^T X of every linear's inputs: what calibrated quantizers minimise their error against.

Shape letters: B rows, T tokens, N real tokens, D features, S of a strip.
"""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from pippin.engines.torch.body import hidden_states
from pippin.engines.torch.lora import LoraLinear
from pippin.engines.torch.packed import PackedLinear
from pippin.engines.torch.rows import Rows

# What reads inputs; a linear in codes is one as well.
LINEARS = (nn.Linear, LoraLinear, PackedLinear)
# Rows of X^T X that are multiplied at once, from the diagonal on.
_STRIP = 256


class Collector:
    """Sums X^T X by linear. Neighbours that read the same tensor share one sum."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.owner: dict[str, str] = {}
        self.real_N: Tensor | None = None
        self._last: tuple[Tensor, str] | None = None

    def hook(self, name: str) -> Any:
        def before(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self.add(name, inputs[0])

        return before

    def add(self, name: str, x: Tensor) -> None:
        if self._last is not None and self._last[0] is x:
            self.owner[name] = self._last[1]
            return
        self._last, self.owner[name] = (x, name), name
        x_ND = x.reshape(-1, x.shape[-1])[self.real_N].float()
        if name not in self.sums:
            width = x_ND.shape[1]
            self.sums[name] = torch.zeros((width, width), dtype=x_ND.dtype, device=x_ND.device)
        add_upper(self.sums[name], x_ND)

    def moments(self) -> dict[str, NDArray[np.float32]]:
        """The sums by linear, on the host; the collector's own are spent."""
        sums = {name: whole(total) for name, total in self.sums.items()}
        self.sums = {}
        return {name: sums[owner] for name, owner in self.owner.items()}


def add_upper(sum_DD: Tensor, x_ND: Tensor) -> None:
    """Add X^T X on and right of the diagonal, in strips of rows: little more than half the work."""
    for start in range(0, len(sum_DD), _STRIP):
        strip = slice(start, start + _STRIP)
        sum_DD[strip, start:].addmm_(x_ND[:, strip].T, x_ND[:, start:])


def mirror(sum_DD: Tensor) -> None:
    """Fill the other triangle, strip by strip."""
    for start in range(0, len(sum_DD), _STRIP):
        stop = start + _STRIP
        own_SS = sum_DD[start:stop, start:stop].triu_()
        own_SS += own_SS.triu(1).T
        sum_DD[stop:, start:stop] = sum_DD[start:stop, stop:].T


def whole(sum_DD: Tensor) -> NDArray[np.float32]:
    """Both triangles, on the host."""
    mirror(sum_DD)
    return sum_DD.cpu().numpy()


@torch.inference_mode()
def input_moments(
    network: PreTrainedModel, batches: Sequence[Rows], names: Collection[str] | None = None
) -> dict[str, NDArray[np.float32]]:
    """By linear's name, the head included: (D, D) float32 over the batches' real tokens.

    With `names`, of those linears alone.
    """
    collector = Collector()
    linears = {
        n: m
        for n, m in network.named_modules()
        if isinstance(m, LINEARS) and (names is None or n in names)
    }
    handles = [m.register_forward_pre_hook(collector.hook(n)) for n, m in linears.items()]
    head = next((n for n, m in linears.items() if m is network.get_output_embeddings()), None)
    try:
        for rows in batches:
            collector.real_N = rows.real_N
            hidden_BTD = hidden_states(network, rows.tokens_BT, **rows.extra)
            if head is not None:
                collector.add(head, hidden_BTD)
    finally:
        for handle in handles:
            handle.remove()
    return collector.moments()
