"""Batched decoding with a KV cache: prompts of different lengths, exact row by row.

Shape letters: B rows, T tokens of the longest prompt, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pippin.engines import Sampling, Tokens
from pippin.engines.sampling import in_step
from pippin.engines.torch.body import cache_argument, close
from pippin.engines.torch.replay import Replay, fits


def generate(
    network: PreTrainedModel, prompts: Sequence[Tokens], sampling: Sampling
) -> Iterator[list[int | None]]:
    """Each step's token of every prompt, None for a row that has ended; ends when all have."""
    if not prompts:
        return
    assert all(len(prompt) for prompt in prompts), "a prompt has at least one token"
    groups = [_Group(network, prompts, rows, sampling) for rows in _groups(network, prompts)]
    yield from in_step(groups, len(prompts), sampling.max_tokens)


def _groups(network: PreTrainedModel, prompts: Sequence[Tokens]) -> list[list[int]]:
    """Rows that decode together. A recurrent state would read the padding: a row of its own."""
    rows = list(range(len(prompts)))
    attends = getattr(network, "_supports_attention_backend", False)
    hybrid = getattr(network, "_is_stateful", False)
    same = len({len(prompt) for prompt in prompts}) <= 1
    return [rows] if same or (attends and not hybrid) else [[row] for row in rows]


@dataclass(slots=True)
class _Rows:
    """The rows still decoding: their number, and what the next forward pass reads."""

    numbers: list[int]
    tokens_BT: Tensor
    mask_BT: Tensor | None
    positions_BT: Tensor


class _Group:
    """Rows padded on the left to one length, decoded together; ended rows leave the batch."""

    def __init__(
        self,
        network: PreTrainedModel,
        prompts: Sequence[Tokens],
        numbers: list[int],
        sampling: Sampling,
    ) -> None:
        self.network, self.sampling = network, sampling
        self.rows = _left_padded([prompts[n] for n in numbers], numbers, network.device)
        self.draws = {n: np.random.default_rng((sampling.seed, n)) for n in numbers}
        self.cache: Any = None
        self.replay: Replay | None = None
        self.places: dict[int, int] = {}

    @torch.inference_mode()
    def step(self) -> list[tuple[int, int]]:
        """(row, token) of the rows that go on after this step."""
        rows = self.rows
        if not rows.numbers:
            return []
        picked = self._pick(self._forward())
        going = [i for i, token in enumerate(picked) if token not in self.sampling.stop]
        out = [(rows.numbers[i], picked[i]) for i in going]
        self._advance(going, picked)
        return out

    def _forward(self) -> Tensor:
        """The logits after the last token, (B, V), in float32 or better."""
        if self.replay is not None:
            logits_BV = self._replayed(self.replay)
        else:
            logits_BV = self._plain()
            if not self.places and self.rows.tokens_BT.shape[1] == 1:
                self.places = {number: place for place, number in enumerate(self.rows.numbers)}
                self.replay = self._recorded(logits_BV)
                if self.replay is not None:
                    self.cache = None  # its keys and values lie in the replay's buffers
        return logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))

    def _plain(self) -> Tensor:
        """By transformers' own cache."""
        rows, name = self.rows, cache_argument(self.network)
        extra = {} if self.cache is None else {name: self.cache}
        out = self.network(
            input_ids=rows.tokens_BT,
            attention_mask=rows.mask_BT,
            position_ids=rows.positions_BT,
            use_cache=True,
            logits_to_keep=1,
            **extra,
        )
        self.cache = out[name]
        return out.logits[:, -1]

    def _recorded(self, wanted_BV: Tensor) -> Replay | None:
        """On CUDA the step that was just made as a recorded one, if that gives the same logits."""
        if self.network.device.type != "cuda" or not fits(self.network, self.cache):
            return None
        try:
            replay = Replay(self.network, self.cache, self.rows.mask_BT, self.sampling.max_tokens)
            if not close(self._replayed(replay), wanted_BV, wanted_BV.dtype):
                return None
            replay.record()
        except (RuntimeError, TypeError, ValueError, AttributeError):
            return None
        return replay

    def _replayed(self, replay: Replay) -> Tensor:
        places = [self.places[number] for number in self.rows.numbers]
        return replay.step(places, self.rows.tokens_BT, self.rows.positions_BT)

    def _pick(self, logits_BV: Tensor) -> list[int]:
        if self.sampling.temperature == 0:
            return logits_BV.argmax(-1).tolist()
        draws = [self.draws[n].random() for n in self.rows.numbers]
        return sample(logits_BV, draws, self.sampling).tolist()

    def _advance(self, going: list[int], picked: list[int]) -> None:
        rows, device = self.rows, self.rows.tokens_BT.device
        index = torch.tensor(going, device=device, dtype=torch.int64)
        mask = rows.mask_BT
        if len(going) < len(rows.numbers):
            self._drop(index)
            mask = None if mask is None else mask[index]
        tokens = torch.tensor([picked[i] for i in going], device=device, dtype=torch.int64)[:, None]
        self.rows = _Rows(
            numbers=[rows.numbers[i] for i in going],
            tokens_BT=tokens,
            mask_BT=None if mask is None else torch.cat([mask, torch.ones_like(tokens)], 1),
            positions_BT=rows.positions_BT[index, -1:] + 1,
        )

    def _drop(self, index: Tensor) -> None:
        if len(index) and self.replay is None:
            self.cache.batch_select_indices(index)


def _left_padded(prompts: list[Tokens], numbers: list[int], device: torch.device) -> _Rows:
    longest = max(len(prompt) for prompt in prompts)
    tokens = np.zeros((len(prompts), longest), np.int64)
    mask = np.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    positions = np.maximum(mask.cumsum(1) - 1, 0)
    return _Rows(
        numbers=numbers,
        tokens_BT=torch.from_numpy(tokens).to(device),
        mask_BT=None if mask.all() else torch.from_numpy(mask).to(device),
        positions_BT=torch.from_numpy(positions).to(device),
    )


def sample(logits_BV: Tensor, draws: list[float], sampling: Sampling) -> Tensor:
    """Invert the cumulative distribution at `draws` in [0, 1): the same tokens on any device.

    top_p keeps the likeliest tokens until their sum reaches it, the one that reaches it included.
    """
    sorted_BV, ids_BV = (logits_BV / sampling.temperature).softmax(-1).sort(-1, descending=True)
    sums_BV = sorted_BV.cumsum(-1)
    kept_BV = sorted_BV.masked_fill(sums_BV - sorted_BV >= sampling.top_p, 0.0)
    sums_BV = kept_BV.cumsum(-1)
    draw_B1 = torch.tensor(draws, dtype=sums_BV.dtype, device=sums_BV.device)[:, None]
    place_B1 = (sums_BV <= draw_B1 * sums_BV[:, -1:]).sum(-1, keepdim=True)
    last_B1 = (kept_BV > 0).sum(-1, keepdim=True) - 1
    return ids_BV.gather(1, torch.minimum(place_B1, last_B1))[:, 0]
