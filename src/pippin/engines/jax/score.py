"""Log-probabilities of given tokens and of the likeliest ones, never holding rows x vocabulary.

Shape letters: B rows, T tokens, N positions of all rows, P chunks, C positions of one chunk, D
hidden, V vocabulary, K kept tokens.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

from pippin.engines import Tokens, TopK
from pippin.engines.jax.architecture import Spec
from pippin.engines.jax.attention import has_cudnn
from pippin.engines.jax.decoder import How, Net, Rows, head_weight, hidden_states, logits
from pippin.engines.jax.loss import chunk_size
from pippin.engines.jax.rows import bucket, padded, power_of_two


def logprobs(spec: Spec, net: Net, tokens_BT: Tokens) -> NDArray[np.float32]:
    """log p(token t+1 | tokens up to t), (B, T-1) float32."""
    following_BT1 = np.roll(tokens_BT, -1, 1)[..., None]
    given = topk(spec, net, tokens_BT, 0, following_BT1)
    return given.logprobs_BTK[:, :-1, 0]


def topk(
    spec: Spec,
    net: Net,
    tokens_BT: Tokens,
    k: int,
    ids_BTK: NDArray[np.int32] | None,
) -> TopK:
    """The k likeliest next tokens at every position, then the given ids (B, T, K), in one pass."""
    rows, columns = tokens_BT.shape
    shape = power_of_two(rows), bucket(columns)
    given = np.zeros((*shape, 0 if ids_BTK is None else ids_BTK.shape[-1]), np.int32)
    if ids_BTK is not None:
        given[:rows, :columns] = ids_BTK
    embed = net.params["embed"]
    how = How(cudnn=has_cudnn(spec, str(embed.dtype), next(iter(embed.devices()))))
    found = _topk((spec, k, how), net, padded(tokens_BT, *shape), given)
    ids, scores = (np.asarray(a)[:rows, :columns] for a in found)
    return TopK(ids_BTK=ids, logprobs_BTK=scores)


@partial(jax.jit, static_argnums=0)
def _topk(asked: tuple[Spec, int, How], net: Net, *arrays: Any) -> tuple[Array, Array]:
    """Padding on the right is never looked at: one segment a row."""
    (spec, k, how), (tokens_BT, given_BTK) = asked, arrays
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    rows = Rows(tokens_BT, positions_BT, jnp.ones_like(tokens_BT))
    hidden_BTD = hidden_states(spec, net, rows, how)
    size = min(chunk_size(spec), tokens_BT.size)

    def chunks(array: Array) -> Array:
        flat = array.reshape(tokens_BT.size, array.shape[-1])
        flat = jnp.pad(flat, ((0, -len(flat) % size), (0, 0)))
        return flat.reshape(len(flat) // size, size, flat.shape[-1])

    def pick(part: tuple[Array, Array]) -> tuple[Array, Array]:
        hidden_CD, given_CK = part
        logits_CV = logits(spec, head_weight(net.params), hidden_CD)
        ids_CK = lax.top_k(logits_CV, k)[1] if k else given_CK[:, :0]
        ids_CK = jnp.concatenate([ids_CK, given_CK], 1)
        picked_CK = jnp.take_along_axis(logits_CV, ids_CK, 1)
        return ids_CK, picked_CK - jax.nn.logsumexp(logits_CV, 1, keepdims=True)

    found = lax.map(pick, (chunks(hidden_BTD), chunks(given_BTK)))
    ids, scores = (f.reshape(-1, f.shape[-1])[: tokens_BT.size] for f in found)
    shape = *tokens_BT.shape, ids.shape[-1]
    return ids.reshape(shape), scores.reshape(shape)
