"""Drawing tokens on the host: the same ones from the same logits, whoever computed them.

Shape letters: B rows, V vocabulary.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pippin.engines import Sampling


class Group(Protocol):
    """Rows that decode together."""

    def step(self) -> Iterable[tuple[int, int]]:
        """(row, token) of every row that has not ended."""
        ...


def in_step(groups: Sequence[Group], rows: int, steps: int) -> Iterator[list[int | None]]:
    """Each step's token of every row, None for one that has ended; ends when all have."""
    for _ in range(steps):
        tokens: list[int | None] = [None] * rows
        for group in groups:
            for row, token in group.step():
                tokens[row] = token
        if all(token is None for token in tokens):
            return
        yield tokens


def sample(logits_BV: NDArray[Any], draws: Sequence[float], sampling: Sampling) -> list[int]:
    """Invert the cumulative distribution at `draws` in [0, 1), one a row.

    top_p keeps the likeliest tokens until their sum reaches it, the one that reaches it included.
    """
    scaled_BV = logits_BV.astype(np.float64) / sampling.temperature
    ids_BV = np.argsort(-scaled_BV, axis=-1, kind="stable")
    sorted_BV = np.take_along_axis(scaled_BV, ids_BV, -1)
    chances_BV = np.exp(sorted_BV - sorted_BV[:, :1])
    chances_BV /= chances_BV.sum(-1, keepdims=True)
    kept_BV = np.where(chances_BV.cumsum(-1) - chances_BV >= sampling.top_p, 0.0, chances_BV)
    sums_BV = kept_BV.cumsum(-1)
    draw_B1 = np.array(draws)[:, None]
    place_B = (sums_BV <= draw_B1 * sums_BV[:, -1:]).sum(-1)
    last_B = (kept_BV > 0).sum(-1) - 1
    places_B1 = np.minimum(place_B, last_B)[:, None]
    return np.take_along_axis(ids_BV, places_B1, -1)[:, 0].tolist()
