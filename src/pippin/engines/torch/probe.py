"""What a network can do exactly, found by trying it on a few tokens when a trainer starts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pippin.data.batches import Batch
from pippin.engines.torch import attention
from pippin.engines.torch.body import close, hidden_states, probe_tokens
from pippin.engines.torch.rows import Rows, masked_rows, math_rows, packed_rows, padded_rows

Layout: TypeAlias = Callable[[Batch, torch.device], Rows]
WINDOWS = ("sliding_window", "attention_chunk_size", "attention_window_size", "local_attention")
FIRST, SECOND, PARTED = 5, 7, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Ability:
    """How batches are laid out for this network; `packs` whether samples may share a row.

    `shares` is whether they may go on from one beginning. `longest` is the longest sample that is
    computed exactly, None for any. `notice` tells what was replaced.
    """

    layout: Layout
    packs: bool
    shares: bool = False
    longest: int | None = None
    notice: str | None = None


def find_ability(network: PreTrainedModel) -> Ability:
    """The fastest layout that gives the network's own numbers, and leaks nothing between samples.

    Leaves the network's attention set to what the layout needs.
    """
    own = network.config._attn_implementation
    wanted = _alone(network)
    attention.register()
    packed = math_rows if own == "eager" and _was_asked(network) else packed_rows
    name = type(network).__name__
    if _supports(network) and _exact(network, attention.NAME, packed, wanted):
        on_cpu = network.device.type == "cpu"  # elsewhere shapes are constant
        parts = on_cpu and _exact(network, attention.NAME, packed, wanted, PARTED)
        text = f"{name} computes a beginning anew for every sample that shares it, which is slower"
        return Ability(
            layout=packed,
            packs=True,
            shares=parts and not _draws(network),
            longest=_blind_window(network),
            notice=text if on_cpu and not parts else None,
        )
    if _exact(network, own, masked_rows, wanted):
        text = f"{name} does not run on packed attention; a block mask is used, which is slower"
        return Ability(layout=masked_rows, packs=True, notice=text)
    network.set_attn_implementation(own)
    return Ability(layout=padded_rows, packs=False)


def _supports(network: PreTrainedModel) -> bool:
    return bool(getattr(network, "_supports_attention_backend", False))


def _was_asked(network: PreTrainedModel) -> bool:
    """Whether eager attention was asked for: transformers has a fused one for this network."""
    capped = getattr(network.config.get_text_config(), "attn_logit_softcapping", None)
    return bool(getattr(network, "_supports_sdpa", False)) and not capped


@torch.no_grad()
def _alone(network: PreTrainedModel) -> Tensor:
    """Hidden states of the second sample by itself, through transformers' own attention."""
    return hidden_states(network, probe_tokens(network, SECOND, seed=1))[0]


def _exact(
    network: PreTrainedModel, name: str, layout: Layout, wanted: Tensor, parted: int = 0
) -> bool:
    """Whether the second sample is what it is alone, from its token `parted` on."""
    network.set_attn_implementation(name)
    try:
        first, other = (_second_sample(network, layout, seed, parted) for seed in (2, 3))
    except (AssertionError, RuntimeError, TypeError, ValueError, AttributeError):
        return False
    leak = (first - other).abs().max()
    quiet = leak <= (1e-6 if first.dtype == torch.float32 else 1e-2) * first.abs().max()
    return bool(quiet) and close(first, wanted[parted:], network.dtype)


@torch.no_grad()
def _second_sample(network: PreTrainedModel, layout: Layout, seed: int, parted: int) -> Tensor:
    """Hidden states of the second of two samples in a row; `seed` draws the first.

    Where it is `parted`, both go on from its first tokens, and what follows them is returned.
    """
    rows = layout(_two_samples(network, seed, parted), network.device)
    return hidden_states(network, rows.tokens_BT, **rows.extra)[0, FIRST + parted :]


def _two_samples(network: PreTrainedModel, seed: int, parted: int = 0) -> Batch:
    first, second = probe_tokens(network, FIRST, seed), probe_tokens(network, SECOND, seed=1)
    lengths = [parted, FIRST, SECOND - parted]
    positions = [
        np.arange(start, start + n) for start, n in zip((0, parted, parted), lengths, strict=True)
    ]
    tokens = torch.cat([second[:, :parted], first, second[:, parted:]], 1)
    return Batch(
        tokens_BT=tokens.cpu().numpy().astype(np.int32),
        positions_BT=np.concatenate(positions)[None].astype(np.int32),
        segments_BT=np.repeat([1, 2, 3], lengths)[None].astype(np.int32),
        scored_BT=np.zeros((1, sum(lengths)), bool),
    )


@torch.no_grad()
def _draws(network: PreTrainedModel) -> bool:
    """Whether training draws random numbers for its tokens, as dropout does, on a CPU."""
    was, state = network.training, torch.get_rng_state()
    network.train()
    rows = packed_rows(_two_samples(network, seed=2), network.device)
    hidden_states(network, rows.tokens_BT, **rows.extra)
    network.train(was)
    drew = not torch.equal(torch.get_rng_state(), state)
    torch.set_rng_state(state)
    return drew


@torch.no_grad()
def _blind_window(network: PreTrainedModel) -> int | None:
    """The window of a model whose layers do not tell packed attention about it."""
    config: Any = network.config.get_text_config()
    sizes = [getattr(config, name, None) for name in WINDOWS]
    windows = [size for size in sizes if isinstance(size, int) and size > 0]
    rows = packed_rows(_two_samples(network, seed=2), network.device)
    rows.extra["packing"].seen = set()
    hidden_states(network, rows.tokens_BT, **rows.extra)
    told = "window" in rows.extra["packing"].seen
    return min(windows) if windows and not told else None
