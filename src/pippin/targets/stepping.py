"""A runtime that holds one conversation and gives the last logits, as a Scorer.

Shape letters: B batch, T tokens, K kept tokens of a distribution, V vocab.
"""

import abc
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pippin.engines import Sampling, Tokens, TopK
from pippin.engines.sampling import sample
from pippin.errors import ModelError

_TOGETHER = 64  # tokens whose log-probabilities over the whole vocabulary are held


class SteppingModel(abc.ABC):
    """A Scorer over `last_logits`. Rows are run in turn; each overwrites the cache of the last.

    `slow` says that a runtime computes here only to show what the file holds: an evaluation gives
    it what fits evaluate.slow_seconds.
    """

    slow = False

    def __init__(self, context: int) -> None:
        self.context = context

    @abc.abstractmethod
    def last_logits(self, tokens: Sequence[int], start: int) -> NDArray[np.float32]:
        """Logits after the last of some tokens, (V,); they take positions start, start + 1, ...

        A row starts at 0: the KV cache needs no clearing.
        """

    def logits(self, tokens: Sequence[int], first: int = 0) -> NDArray[np.float32]:
        """Logits after every token of one row from `first` on, (T, V), a step each."""
        self.require_room(len(tokens))
        beginning = self.last_logits(tokens[: first + 1], 0)
        rest = enumerate(tokens[first + 1 :], first + 1)
        return np.stack([beginning, *(self.last_logits([token], i) for i, token in rest)])

    def logprobs(self, tokens_BT: Tokens) -> NDArray[np.float32]:
        """log p(token t+1 | tokens up to t), (B, T-1) float32; ModelError beyond the context."""
        return np.stack([self._row_logprobs(row) for row in np.asarray(tokens_BT, np.int64)])

    def topk(
        self,
        tokens_BT: Tokens,
        k: int,
        ids_BTK: NDArray[np.int32] | None = None,
        first: int = 0,
    ) -> TopK:
        """The k likeliest next tokens at every position from `first` on, then the given ids."""
        rows_BT = np.asarray(tokens_BT, np.int64)
        none_BTK = np.empty((*rows_BT[:, first:].shape, 0), np.int32)
        given_BTK = none_BTK if ids_BTK is None else ids_BTK
        found = [
            _likeliest(self.logits(row_T, first), k, given_TK)
            for row_T, given_TK in zip(rows_BT, given_BTK, strict=True)
        ]
        ids, logprobs = zip(*found, strict=True)
        return TopK(ids_BTK=np.stack(ids), logprobs_BTK=np.stack(logprobs))

    def generate(self, prompts: Sequence[Tokens], sampling: Sampling) -> Iterator[list[int | None]]:
        """Each step's token of every prompt; None for a row that has ended.

        The file holds one conversation, so several prompts are answered in turn before the first
        step is yielded; a single one streams.
        """
        if len(prompts) == 1:
            yield from ([token] for token in self._answer(prompts[0], sampling, 0))
            return
        answers = [list(self._answer(p, sampling, i)) for i, p in enumerate(prompts)]
        for step in range(max(map(len, answers), default=0)):
            yield [answer[step] if step < len(answer) else None for answer in answers]

    def require_room(self, length: int) -> None:
        """Raise ModelError where so many tokens do not fit."""
        if not 0 < length <= self.context:
            raise ModelError(
                f"a row of {length} tokens does not fit the deployed context of {self.context}",
                "set deploy.context to the longest conversation and deploy again",
            )

    def _row_logprobs(self, row_T: NDArray[np.int64]) -> NDArray[np.float32]:
        # A row's logits can be large (T x V): they are reduced as they come.
        self.require_room(len(row_T))
        found = [
            log_softmax(self.last_logits([now], i))[following]
            for i, (now, following) in enumerate(itertools.pairwise(row_T))
        ]
        return np.array(found, np.float32)

    def _answer(self, prompt: Tokens, sampling: Sampling, row: int) -> Iterator[int]:
        random = np.random.default_rng([sampling.seed, row])
        tokens, start = [int(t) for t in prompt], 0
        for _ in range(sampling.max_tokens):
            if start + len(tokens) > self.context:
                return
            logits_V = self.last_logits(tokens, start)
            if sampling.temperature == 0:
                token = int(logits_V.argmax())
            else:
                (token,) = sample(logits_V[None], [random.random()], sampling)
            if token in sampling.stop:
                return
            yield token
            tokens, start = [token], start + len(tokens)


def _likeliest(
    logits_TV: NDArray[np.float32], k: int, given_TK: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Ids and log-probabilities, (T, K) each, the given ones behind the k likeliest.

    Some tokens at a time: a row's logits can be large.
    """
    ids, logprobs = [], []
    for start in range(0, len(logits_TV), _TOGETHER):
        stop = start + _TOGETHER
        logprobs_XV = log_softmax(logits_TV[start:stop])
        best_XK = largest(logprobs_XV, k).astype(np.int32)
        ids.append(np.concatenate([best_XK, given_TK[start:stop]], -1))
        logprobs.append(np.take_along_axis(logprobs_XV, ids[-1], -1).astype(np.float32))
    return np.concatenate(ids), np.concatenate(logprobs)


def log_softmax(logits_TV: NDArray[Any]) -> NDArray[Any]:
    """Log-probabilities over the last axis, float32."""
    shifted = logits_TV - logits_TV.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True, dtype=np.float64)).astype(
        np.float32
    )


def largest(values_TV: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Indices of the k largest of the last axis, largest first."""
    k = min(k, values_TV.shape[-1])
    ids = np.argpartition(-values_TV, k - 1, axis=-1)[..., :k]
    order = np.argsort(-np.take_along_axis(values_TV, ids, -1), axis=-1, kind="stable")
    return np.take_along_axis(ids, order, -1)
