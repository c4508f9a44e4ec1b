"""Samples packed into rows of constant length, in an order that is a function of seed and data.

Shape letters: B rows, T tokens.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One tokenized row: `tokens` int32 (T,), `scored` bool (T,) marks what must be predicted.

    `row` is the index in its split. `scored[0]` is always false: nothing predicts the first token.
    """

    tokens: NDArray[np.int32]
    scored: NDArray[np.bool_]
    row: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Packed rows. `segments` numbers the samples of a row from 1; 0 is padding.

    Positions restart with every sample; a sample attends to itself alone. `scored` marks the tokens
    that are predicted from the token before them.
    """

    tokens_BT: NDArray[np.int32]
    positions_BT: NDArray[np.int32]
    segments_BT: NDArray[np.int32]
    scored_BT: NDArray[np.bool_]

    @property
    def scored_tokens(self) -> int:
        """How many tokens enter the loss."""
        return int(self.scored_BT.sum())

    @property
    def real_tokens(self) -> int:
        """How many tokens are not padding."""
        return int((self.segments_BT > 0).sum())
