"""What a network can do exactly, found by trying it on a few tokens.

Shape letters: T tokens, D hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
from mlx import nn

from pippin.data.batches import Batch
from pippin.engines.mlx.attention import packed_attention
from pippin.engines.mlx.body import body, close, hidden_states, probe_tokens
from pippin.engines.mlx.rows import Rows, masked_rows, packed_rows, padded_rows, slotted_rows

Layout: TypeAlias = Callable[[Batch], Rows]
FIRST, SECOND, SHARED = 5, 7, 3
FAULTS = (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ability:
    """How batches are laid out for this network; `packs` whether samples may share a row.

    `shares` whether they may share tokens as well; `notice` tells what was replaced.
    """

    layout: Layout
    packs: bool
    shares: bool = False
    notice: str | None = None


def find_ability(network: nn.Module) -> Ability:
    """The fastest layout that gives the network's own numbers and keeps samples apart."""
    wanted_TD = hidden_states(network, probe_tokens(network, SECOND, seed=1))[0]
    on_cpu = mx.default_device() == mx.cpu
    layout, shared = (packed_rows, SHARED) if on_cpu else (slotted_rows, 0)
    if _exact(network, layout, wanted_TD, shared):
        return Ability(layout=layout, packs=True, shares=shared > 0)
    name = f"mlx-lm's {type(network).__module__.rpartition('.')[2]}"
    if _exact(network, masked_rows, wanted_TD, SHARED):
        text = f"{name} computes attention itself; a block mask is used, which is slower"
        return Ability(layout=masked_rows, packs=True, shares=True, notice=text)
    return Ability(layout=padded_rows, packs=False)


def run_rows(network: nn.Module, rows: Rows, *, whole: bool = False) -> mx.array:
    """Hidden states (1, N, D) or (B, T, D) of a batch that was laid out; logits with `whole`."""
    run = network if whole else body(network)
    if rows.packing is None:
        return run(rows.tokens_BT)
    with packed_attention(network):
        return run(rows.tokens_BT, cache=rows.cache(network))


def _exact(network: nn.Module, layout: Layout, wanted_TD: mx.array, shared: int) -> bool:
    """Whether the second of two samples is computed alone, its first `shared` tokens apart."""
    try:
        batches = [_two_samples(network, seed, shared) for seed in (2, 3)]
        first, other = (_second_sample(network, layout(batch)) for batch in batches)
    except FAULTS:
        return False
    leak = mx.abs(first - other).max()
    limit = (1e-6 if first.dtype == mx.float32 else 1e-2) * mx.abs(first).max()
    return bool(leak <= limit) and close(first, wanted_TD)


def _second_sample(network: nn.Module, rows: Rows) -> mx.array:
    """Hidden states of the second of two samples in a row."""
    hidden_TD: Any = run_rows(network, rows)[0, FIRST : FIRST + SECOND]
    mx.eval(hidden_TD)
    return hidden_TD


def _two_samples(network: nn.Module, seed: int, shared: int) -> Batch:
    """`seed` draws the first."""
    lengths = [FIRST, SECOND]
    samples = [probe_tokens(network, FIRST, seed), probe_tokens(network, SECOND, seed=1)]
    return Batch(
        tokens_BT=np.array(mx.concatenate(samples, 1)),
        positions_BT=np.concatenate([np.arange(n) for n in lengths])[None].astype(np.int32),
        segments_BT=np.repeat([1, 2, 3], [FIRST, shared, SECOND - shared])[None].astype(np.int32),
        scored_BT=np.zeros((1, sum(lengths)), bool),
    )
