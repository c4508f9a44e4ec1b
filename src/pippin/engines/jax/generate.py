"""Batched decoding with a KV cache in one compiled loop, for prompts of different lengths.

Shape letters: B rows, T tokens, P prompt slots, S cache slots, L layers, K kv heads, C head
channels, V vocabulary, N tokens of one call.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

from pippin.engines import Sampling, Tokens
from pippin.engines.jax.architecture import Spec
from pippin.engines.jax.attention import Attend, scores_to_values
from pippin.engines.jax.decoder import (
    Net,
    Tools,
    embed,
    facts,
    head_weight,
    layer,
    logits,
    norm,
    rotations,
)
from pippin.engines.jax.products import ROUNDS, linears
from pippin.engines.jax.rows import bucket, power_of_two

TOKENS_A_CALL = 16


class State(NamedTuple):
    """Between two calls: caches (L, B, S, K, C), logits (B, V) of the next token, who has ended."""

    keys: Array
    values: Array
    logits_BV: Array
    slot: Array
    start_B: Array
    ended_B: Array


def generate(
    spec: Spec, net: Net, prompts: Sequence[Tokens], sampling: Sampling
) -> Iterator[list[int | None]]:
    """Each step's token of every prompt, None for a row that has ended; ends when all have."""
    if not prompts:
        return
    assert all(len(prompt) for prompt in prompts), "a prompt has at least one token"
    tokens_BP, start_B = _left_padded(prompts)
    slots = bucket(tokens_BP.shape[1] + -(-sampling.max_tokens // TOKENS_A_CALL) * TOKENS_A_CALL)
    unused = np.arange(len(tokens_BP)) >= len(prompts)
    state = _prefill(spec, slots, net, tokens_BP, start_B, unused)
    draws = [np.random.default_rng((sampling.seed, n)) for n in range(len(prompts))]
    stop = _stop_tokens(sampling)
    for first in range(0, sampling.max_tokens, TOKENS_A_CALL):
        drawn_NB = np.zeros((TOKENS_A_CALL, len(tokens_BP)), np.float32)
        if sampling.temperature:
            drawn_NB[:, : len(prompts)] = np.stack([d.random(TOKENS_A_CALL) for d in draws], 1)
        how = (spec, sampling.temperature > 0)
        scale = np.array([sampling.temperature or 1.0, sampling.top_p], np.float32)
        picked, state = _decode(how, net, state, stop, drawn_NB, scale)
        for step in np.asarray(picked)[: sampling.max_tokens - first, : len(prompts)].tolist():
            if all(token < 0 for token in step):
                return
            yield [None if token < 0 else token for token in step]


def _left_padded(prompts: Sequence[Tokens]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """(B, P) of rounded sizes, and where each row's prompt starts; extra rows hold one token."""
    columns = bucket(max(map(len, prompts)))
    tokens_BP = np.zeros((power_of_two(len(prompts)), columns), np.int32)
    start_B = np.full(len(tokens_BP), columns - 1, np.int32)
    for row, prompt in enumerate(prompts):
        start_B[row] = columns - len(prompt)
        tokens_BP[row, start_B[row] :] = prompt
    return tokens_BP, start_B


def _stop_tokens(sampling: Sampling) -> NDArray[np.int32]:
    """Filled up with -1, which no token is, to a few sizes."""
    stop = sorted(sampling.stop)
    return np.array(stop + [-1] * (-len(stop) % 8 or 8 * (not stop)), np.int32)


@partial(jax.jit, static_argnums=(0, 1), compiler_options=ROUNDS)
def _prefill(spec: Spec, slots: int, net: Net, *arrays: Any) -> State:
    tokens_BP, start_B, ended_B = arrays
    rows = tokens_BP.shape[0]
    cache = (spec.num_layers, rows, slots, spec.num_kv_heads, spec.head_dim)
    zeros = jnp.zeros(cache, net.params["embed"].dtype)
    empty = jnp.zeros((rows, spec.vocab_size), jnp.float32)
    state = State(zeros, zeros, empty, jnp.int32(0), start_B, ended_B)
    return _forward(spec, net, state, tokens_BP)


@partial(jax.jit, static_argnums=0, donate_argnums=2, compiler_options=ROUNDS)
def _decode(how: tuple[Spec, bool], net: Net, state: State, *arrays: Any) -> tuple[Array, State]:
    """(N, B) tokens, -1 for a row that has ended, and the state after them."""
    spec, samples = how
    stop, drawn_NB, scale = arrays

    def step(carry: tuple[Array, State, Array]) -> tuple[Array, State, Array]:
        number, state, out_NB = carry
        token_B = jnp.argmax(state.logits_BV, -1)
        if samples:
            token_B = _sample(state.logits_BV, drawn_NB[number], scale[0], scale[1])
        ended_B = state.ended_B | (token_B[:, None] == stop).any(1)
        out_NB = out_NB.at[number].set(jnp.where(ended_B, -1, token_B))
        state = _forward(spec, net, state._replace(ended_B=ended_B), token_B[:, None])
        return number + 1, state, out_NB

    def going(carry: tuple[Array, State, Array]) -> Array:
        return (carry[0] < len(drawn_NB)) & ~carry[1].ended_B.all()

    out_NB = jnp.full(drawn_NB.shape, -1, jnp.int32)
    _, state, out_NB = lax.while_loop(going, step, (jnp.int32(0), state, out_NB))
    return out_NB, state


def _forward(spec: Spec, net: Net, state: State, tokens_BT: Array) -> State:
    """T tokens of every row into the slots from `state.slot` on; logits after the last."""
    slot_T = state.slot + jnp.arange(tokens_BT.shape[1])
    positions_BT = jnp.maximum(slot_T[None] - state.start_B[:, None], 0)
    turns = rotations(spec, positions_BT, net.params["embed"].dtype)

    def step(carry: tuple[Array, Array, Array], per: Any) -> tuple[Any, None]:
        x_BTD, keys, values = carry
        weights, pairs, fact, number = per
        caches = _Caches(keys, values)
        attend = _cached_attention(spec, state, caches, fact.window, number)
        tools = Tools(turns.of(fact), attend, linears(weights, pairs, rounds=True))
        x_BTD = layer(spec, weights, x_BTD, tools)
        return (x_BTD, caches.keys, caches.values), None

    numbers = jnp.arange(spec.num_layers)
    start = (embed(spec, net.params, tokens_BT), state.keys, state.values)
    per_layer = (net.params["layers"], net.lora, facts(spec), numbers)
    (x_BTD, keys, values), _ = lax.scan(step, start, per_layer)
    last_BD = norm(spec, x_BTD[:, -1], net.params["norm"])
    return state._replace(
        keys=keys,
        values=values,
        logits_BV=logits(spec, head_weight(net.params), last_BD),
        slot=state.slot + tokens_BT.shape[1],
    )


class _Caches:
    """The caches of all layers, (L, B, S, K, C), while one layer adds to them."""

    def __init__(self, keys: Array, values: Array) -> None:
        self.keys, self.values = keys, values


def _cached_attention(
    spec: Spec, state: State, caches: _Caches, window: Array, number: Array
) -> Attend:
    def attend(q: Array, k: Array, v: Array) -> Array:
        place = (number, 0, state.slot, 0, 0)
        caches.keys = lax.dynamic_update_slice(caches.keys, k[None], place)
        caches.values = lax.dynamic_update_slice(caches.values, v[None], place)
        slot_T, slot_S = state.slot + jnp.arange(q.shape[1]), jnp.arange(caches.keys.shape[2])
        distance_TS = slot_T[:, None] - slot_S[None]
        seen_TS = (distance_TS >= 0) & (distance_TS < window)
        real_BS = slot_S[None] >= state.start_B[:, None]
        seen_BTS = seen_TS[None] & real_BS[:, None]
        return scores_to_values(spec, q, caches.keys[number], caches.values[number], seen_BTS)

    return attend


def _sample(logits_BV: Array, draw_B: Array, temperature: Array, top_p: Array) -> Array:
    """Invert the cumulative distribution at `draw_B` in [0, 1): the same tokens on any device.

    top_p keeps the likeliest tokens until their sum reaches it, the one that reaches it included.
    """
    ids_BV = jnp.argsort(-logits_BV, -1, stable=True)
    scores_BV = jnp.take_along_axis(logits_BV, ids_BV, 1)
    sorted_BV = jax.nn.softmax(scores_BV / temperature, -1)
    sums_BV = jnp.cumsum(sorted_BV, -1)
    kept_BV = jnp.where(sums_BV - sorted_BV >= top_p, 0.0, sorted_BV)
    sums_BV = jnp.cumsum(kept_BV, -1)
    place_B = (sums_BV <= (draw_B * sums_BV[:, -1])[:, None]).sum(-1)
    last_B = (kept_BV > 0).sum(-1) - 1
    return jnp.take_along_axis(ids_BV, jnp.minimum(place_B, last_B)[:, None], 1)[:, 0]
