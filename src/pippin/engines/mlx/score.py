"""Log-probabilities of given tokens and of the likeliest ones, never holding rows x vocabulary.

Shape letters: B rows, T tokens, N positions of all rows, D hidden, V vocabulary, K kept tokens,
C positions of one chunk.
"""

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from numpy.typing import NDArray

from pippin.engines import Tokens, TopK
from pippin.engines.mlx.body import Head, hidden_states
from pippin.engines.mlx.elementwise import logsumexp


def logprobs(network: nn.Module, head: Head | None, tokens_BT: Tokens) -> NDArray[np.float32]:
    """log p(token t+1 | tokens up to t), (B, T-1) float32."""
    wanted_N1 = mx.array(np.ascontiguousarray(tokens_BT[:, 1:], np.int32).reshape(-1, 1))

    def pick(logits_CV: mx.array, part: slice) -> mx.array:
        target_C1 = mx.take_along_axis(logits_CV, wanted_N1[part], axis=1)
        return (target_C1 - logsumexp(logits_CV))[:, 0]

    rows, columns = tokens_BT.shape[0], tokens_BT.shape[1] - 1
    picked = list(_over_chunks(network, head, tokens_BT[:, :-1], pick))
    return np.concatenate([np.array(part) for part in picked]).reshape(rows, columns)


def topk(
    network: nn.Module,
    head: Head | None,
    tokens_BT: Tokens,
    k: int,
    ids_BTK: NDArray[np.int32] | None,
) -> TopK:
    """The k likeliest next tokens at every position, then the given ids, in one pass."""
    given_BTK = np.zeros((*tokens_BT.shape, 0), np.int32) if ids_BTK is None else ids_BTK
    given_NK = mx.array(np.ascontiguousarray(given_BTK, np.int32).reshape(tokens_BT.size, -1))

    def pick(logits_CV: mx.array, part: slice) -> tuple[mx.array, mx.array]:
        ids_CK = mx.concatenate([likeliest(logits_CV, k), given_NK[part]], axis=1)
        kept_CK = mx.take_along_axis(logits_CV, ids_CK, axis=1)
        return ids_CK, kept_CK - logsumexp(logits_CV)

    picked = list(_over_chunks(network, head, tokens_BT, pick))
    ids, kept = ([np.array(part) for part in parts] for parts in zip(*picked, strict=True))
    shape = (*tokens_BT.shape, -1)
    return TopK(
        ids_BTK=np.concatenate(ids).reshape(shape).astype(np.int32),
        logprobs_BTK=np.concatenate(kept).reshape(shape),
    )


def likeliest(logits_CV: mx.array, k: int) -> mx.array:
    """The k likeliest ids of every row, likeliest first, (C, K) int32."""
    if k == 0:
        return mx.zeros((len(logits_CV), 0), mx.int32)
    vocab = logits_CV.shape[1]
    ids_CK = mx.argpartition(-logits_CV, k - 1, axis=1)[:, :k] if k < vocab else None
    if ids_CK is None:
        return mx.argsort(-logits_CV, axis=1).astype(mx.int32)
    order_CK = mx.argsort(-mx.take_along_axis(logits_CV, ids_CK, axis=1), axis=1)
    return mx.take_along_axis(ids_CK, order_CK, axis=1).astype(mx.int32)


def _over_chunks(
    network: nn.Module,
    head: Head | None,
    tokens_BT: Tokens,
    pick: Callable[[mx.array, slice], Any],
) -> Iterator[Any]:
    """`pick(logits_CV, positions)` over consecutive chunks of the flattened positions."""
    tokens = mx.array(np.ascontiguousarray(tokens_BT, np.int32))
    if head is None:
        yield from _over_rows(network, tokens, pick)
        return
    hidden_ND = hidden_states(network, tokens).flatten(0, 1)
    for start in range(0, len(hidden_ND), head.chunk):
        part = slice(start, start + head.chunk)
        picked = pick(head.logits(hidden_ND[part]), part)
        mx.eval(picked)
        yield picked


def _over_rows(
    network: nn.Module, tokens_BT: mx.array, pick: Callable[[mx.array, slice], Any]
) -> Iterator[Any]:
    """A head that is not a plain product: the model's own forward, a row at a time."""
    length = tokens_BT.shape[1]
    for row in range(len(tokens_BT)):
        logits_TV = network(tokens_BT[row : row + 1])[0].astype(mx.float32)
        picked = pick(logits_TV, slice(row * length, (row + 1) * length))
        mx.eval(picked)
        yield picked
