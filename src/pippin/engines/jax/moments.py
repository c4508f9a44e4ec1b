"""X^T X of every linear's inputs: what calibrated quantizers minimise their error against.

Shape letters: B rows, T tokens, N real tokens, D features.
"""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from pippin.data.batches import Batch
from pippin.engines.jax.architecture import Spec
from pippin.engines.jax.attention import row_attention
from pippin.engines.jax.decoder import (
    Net,
    Rows,
    Tools,
    embed,
    facts,
    layer,
    norm,
    rotations,
)
from pippin.engines.jax.load import layer_name
from pippin.engines.jax.products import EXACT, linears
from pippin.engines.jax.rows import FIELDS, bucket, padded, power_of_two

HEAD = "lm_head"
# Linears that read the same inputs, under the first of them.
READERS = {
    "self_attn.q_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}


def input_moments(
    model: tuple[Spec, Net], batches: Sequence[Batch], names: Collection[str] | None
) -> dict[str, NDArray[np.float32]]:
    """By linear's name, the head included: (D, D) float32 over the batches' real tokens.

    With `names`, of those linears alone. A layer at a time: memory is that of the sums.
    """
    spec = model[0]
    wanted = _wanted(spec, names)
    sums: dict[str, Array] = {}
    for batch in batches if wanted else ():
        _add_batch(model, batch, wanted, sums)
    arrays = {owner: np.asarray(total) for owner, total in sums.items()}
    return {name: arrays[owner] for owner, readers in wanted.items() for name in readers}


def _wanted(spec: Spec, names: Collection[str] | None) -> dict[str, list[str]]:
    """The linears asked for, under the one whose inputs stand for theirs."""
    groups = {HEAD: [HEAD]}
    for number in range(spec.num_layers):
        for owner, readers in READERS.items():
            full = [layer_name(number, reader) for reader in readers]
            groups[layer_name(number, owner)] = full
    kept = {o: [n for n in group if names is None or n in names] for o, group in groups.items()}
    return {owner: group for owner, group in kept.items() if group}


def _add_batch(
    model: tuple[Spec, Net],
    batch: Batch,
    wanted: dict[str, list[str]],
    sums: dict[str, Array],
) -> None:
    spec, net = model
    shape = power_of_two(batch.tokens_BT.shape[0]), bucket(batch.tokens_BT.shape[1])
    rows = Rows(*(jnp.asarray(padded(getattr(batch, name), *shape)) for name in FIELDS))
    real_BT = rows.segments_BT > 0
    x_BTD = embed(spec, net.params, rows.tokens_BT)
    for number in range(spec.num_layers):
        stacks = net.params["layers"], net.lora, facts(spec)
        x_BTD, read = _layer(spec, x_BTD, rows, jax.tree.map(lambda a, n=number: a[n], stacks))
        for name, inputs in read.items():
            if (owner := layer_name(number, name)) in wanted:
                sums[owner] = _add(sums.get(owner), inputs, real_BT)
    if HEAD in wanted:
        sums[HEAD] = _add(sums.get(HEAD), norm(spec, x_BTD, net.params["norm"]), real_BT)


@partial(jax.jit, static_argnums=0)
def _layer(spec: Spec, x_BTD: Array, rows: Rows, per: Any) -> tuple[Array, dict[str, Array]]:
    """The layer's output, and what its linears read."""
    weights, pairs, fact = per
    turn = rotations(spec, rows.positions_BT, x_BTD.dtype).of(fact)
    project, read = linears(weights, pairs), {}

    def watched(name: str, x: Array) -> Array:
        if name in READERS:
            read[name] = x
        return project(name, x)

    attend = row_attention(spec, rows.segments_BT, fact.window)
    return layer(spec, weights, x_BTD, Tools(turn, attend, watched)), read


def _add(total_DD: Array | None, x: Array, real_BT: Array) -> Array:
    if total_DD is None:
        total_DD = jnp.zeros((x.shape[-1],) * 2, jnp.float32)
    return _add_products(total_DD, x, real_BT)


@partial(jax.jit, donate_argnums=0)
def _add_products(total_DD: Array, x: Array, real_BT: Array) -> Array:
    x_ND = jnp.where(real_BT[..., None], x, 0).astype(jnp.float32).reshape(-1, x.shape[-1])
    return total_DD + jnp.matmul(x_ND.T, x_ND, precision=EXACT)
