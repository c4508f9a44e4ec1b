"""Log-probabilities of given tokens and of the likeliest ones, never holding rows x vocabulary.

Shape letters: B rows, T tokens, N positions of all rows, D hidden, V vocabulary, K kept tokens.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from pippin.engines import Tokens, TopK
from pippin.engines.torch.body import hidden_states
from pippin.engines.torch.loss import Head


def to_device(tokens_BT: Tokens, device: torch.device) -> Tensor:
    """int32 on the host -> int64 on the device."""
    return torch.from_numpy(np.ascontiguousarray(tokens_BT, dtype=np.int64)).to(device)


@torch.inference_mode()
def logprobs(network: PreTrainedModel, head: Head | None, tokens_BT: Tokens) -> NDArray[Any]:
    """log p(token t+1 | tokens up to t), (B, T-1) float32."""
    tokens = to_device(tokens_BT, network.device)
    wanted_N = tokens[:, 1:].flatten()

    def pick(logits_CV: Tensor, part: slice) -> Tensor:
        target_C = logits_CV.gather(1, wanted_N[part, None])[:, 0]
        return target_C - logits_CV.logsumexp(1)

    rows, columns = tokens_BT.shape[0], tokens_BT.shape[1] - 1
    picked = list(_over_chunks(network, head, tokens[:, :-1], pick))
    return torch.cat(picked).view(rows, columns).float().cpu().numpy()


@torch.inference_mode()
def topk(
    network: PreTrainedModel,
    head: Head | None,
    tokens_BT: Tokens,
    k: int,
    ids_BTK: NDArray[np.int32] | None,
) -> TopK:
    """The k likeliest next tokens at every position, then the given ids, in one pass."""
    tokens = to_device(tokens_BT, network.device)
    given_BTK = tokens_BT[..., None][..., :0] if ids_BTK is None else ids_BTK
    given_NK = to_device(given_BTK.reshape(tokens_BT.size, -1), network.device)

    def pick(logits_CV: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        ids_CK = torch.cat([logits_CV.topk(k, dim=1).indices, given_NK[part]], 1)
        return ids_CK, logits_CV.gather(1, ids_CK) - logits_CV.logsumexp(1, keepdim=True)

    picked = list(_over_chunks(network, head, tokens, pick))
    ids_NK, logprobs_NK = (torch.cat(parts) for parts in zip(*picked, strict=True))
    shape = (*tokens_BT.shape, -1)
    return TopK(
        ids_BTK=ids_NK.view(shape).to(torch.int32).cpu().numpy(),
        logprobs_BTK=logprobs_NK.view(shape).float().cpu().numpy(),
    )


def _over_chunks(
    network: PreTrainedModel,
    head: Head | None,
    tokens_BT: Tensor,
    pick: Callable[[Tensor, slice], Any],
) -> Iterator[Any]:
    """`pick(logits_CV, positions)` over consecutive chunks of the flattened positions."""
    if head is None:
        yield from _over_rows(network, tokens_BT, pick)
        return
    hidden_ND = hidden_states(network, tokens_BT).flatten(0, 1)
    for start in range(0, len(hidden_ND), head.chunk):
        part = slice(start, start + head.chunk)
        yield pick(head.logits(hidden_ND[part]), part)


def _over_rows(
    network: PreTrainedModel, tokens_BT: Tensor, pick: Callable[[Tensor, slice], Any]
) -> Iterator[Any]:
    """A head that is not a plain product: the model's own forward, a row at a time."""
    length = tokens_BT.shape[1]
    for row in range(len(tokens_BT)):
        logits_TV = network(input_ids=tokens_BT[row : row + 1], use_cache=False).logits[0]
        exact = torch.promote_types(logits_TV.dtype, torch.float32)
        yield pick(logits_TV.to(exact), slice(row * length, (row + 1) * length))
