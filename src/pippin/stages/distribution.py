"""What a measured model predicted, kept so that the models made from it can be compared with it.

Shape letters: S held-out rows, N scored positions of all rows in order, K kept tokens.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors import numpy as safetensors

from pippin.data.batches import Sample
from pippin.errors import PippinError

FILE = "topk.safetensors"
# Probabilities summed from float32 log-probabilities are known to about this much.
FLOOR = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """The likeliest next tokens at every scored position, and each row's summed loss in nats.

    `ids_NK` and `logprobs_NK` are likeliest first; `counts_S` are scored positions of each row,
    `digests_S` tell whether two distributions are about the same rows.
    """

    ids_NK: NDArray[np.int32]
    logprobs_NK: NDArray[np.float32]
    losses_S: NDArray[np.float64]
    counts_S: NDArray[np.int32]
    digests_S: NDArray[np.uint64]

    def of_rows(self, rows: Sequence[int]) -> "Distribution":
        """The same about these rows alone, in this order."""
        starts_S = np.concatenate([[0], np.cumsum(self.counts_S)])
        parts = [np.arange(starts_S[row], starts_S[row + 1]) for row in rows]
        positions = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        return Distribution(
            ids_NK=self.ids_NK[positions],
            logprobs_NK=self.logprobs_NK[positions],
            losses_S=self.losses_S[list(rows)],
            counts_S=self.counts_S[list(rows)],
            digests_S=self.digests_S[list(rows)],
        )

    @property
    def loss(self) -> float:
        """Nats a scored token."""
        return float(self.losses_S.sum() / self.counts_S.sum())


def gain(base: Distribution, tuned: Distribution) -> tuple[float, float]:
    """Nats a token by which `tuned` is better on the same rows, and the standard error of that."""
    return _ratio(base.losses_S - tuned.losses_S, base.counts_S)


def gain_kept(base: Distribution, tuned: Distribution, found: Distribution) -> tuple[float, float]:
    """The share of `tuned`'s gain that `found` has on the same rows, and its standard error."""
    return _ratio(base.losses_S - found.losses_S, base.losses_S - tuned.losses_S)


def _ratio(upper_S: NDArray[Any], lower_S: NDArray[Any]) -> tuple[float, float]:
    """A ratio of sums over rows, and its standard error: of a single row 0, as nobody knows it."""
    ratio, rows = float(upper_S.sum() / lower_S.sum()), len(lower_S)
    away = float(np.linalg.norm(upper_S - ratio * lower_S)) / abs(float(lower_S.sum()))
    return ratio, away * (rows / max(1, rows - 1)) ** 0.5


def row_digest(sample: Sample) -> int:
    """64 bits that stand for a row's tokens and for which of them are scored."""
    hasher = hashlib.sha256(sample.tokens.astype("<i4").tobytes())
    hasher.update(sample.scored.astype("u1").tobytes())
    return int.from_bytes(hasher.digest()[:8], "little")


def save(folder: Path, distribution: Distribution) -> None:
    """Write the distribution into a folder."""
    names = Distribution.__dataclass_fields__
    arrays = {name: np.ascontiguousarray(getattr(distribution, name)) for name in names}
    # save_file would leave a file that only its owner may read.
    (folder / FILE).write_bytes(safetensors.save(arrays))


def load(folder: Path) -> Distribution:
    """The distribution an evaluation left in its folder.

    Raises PippinError where there is none, or it is damaged.
    """
    if not (folder / FILE).is_file():
        raise PippinError(f"{folder} holds no evaluation", "evaluate again: --redo evaluate")
    try:
        return Distribution(**safetensors.load_file(folder / FILE))
    except (SafetensorError, TypeError, ValueError) as error:
        raise PippinError(
            f"{folder / FILE} is damaged: {error}", "evaluate again: --redo evaluate"
        ) from error


def load_for(folder: Path, samples: Sequence[Sample]) -> Distribution:
    """The part of a stored distribution that is about `samples`, in their order.

    Raises PippinError where some of them were not measured there.
    """
    stored = load(folder)
    row_of = {int(digest): row for row, digest in enumerate(stored.digests_S)}
    rows = [row_of.get(row_digest(sample)) for sample in samples]
    found = [row for row in rows if row is not None]
    if len(found) < len(rows):
        raise PippinError(
            f"{folder.name} measured {len(found)} of these {len(rows)} held-out rows",
            "the data, the tokenizer or `evaluate.rows` changed since: --redo evaluate",
        )
    return stored.of_rows(found)


def divergence(logp_NK: NDArray[np.floating], logq_NK: NDArray[np.floating]) -> NDArray[np.float64]:
    """KL(p || q) in nats at every position, (N,) float64, from K of the tokens and the rest's mass.

    `logp_NK` and `logq_NK` are two models' log-probabilities of the same K tokens. All other tokens
    count as one, which by the log sum inequality makes this a lower bound of the true divergence
    (Cover & Thomas, Elements of Information Theory, 2.7); with K = vocabulary it is equal.
    """
    logp_NK, logq_NK = logp_NK.astype(np.float64), logq_NK.astype(np.float64)
    kept_N = (np.exp(logp_NK) * (logp_NK - logq_NK)).sum(axis=1)
    rest_p_N, rest_q_N = _rest(logp_NK), _rest(logq_NK)
    return kept_N + rest_p_N * np.log(rest_p_N / rest_q_N)


def _rest(logprobs_NK: NDArray[np.float64]) -> NDArray[np.float64]:
    # Raising both sides to the same floor can only lower the sum: the bound stays one.
    return np.maximum(1.0 - np.exp(logprobs_NK).sum(axis=1), FLOOR)
