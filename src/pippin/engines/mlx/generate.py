"""Batched decoding with a KV cache: prompts of different lengths, exact row by row.

Shape letters: B rows, T tokens of the longest prompt, D hidden, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (
    BatchKVCache,
    BatchRotatingKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from pippin.engines import Sampling, Tokens
from pippin.engines.mlx.body import Loaded, close, hidden_states, probe_tokens
from pippin.engines.mlx.probe import FAULTS
from pippin.engines.sampling import in_step, sample
from pippin.errors import ModelError


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoding:
    """`batched` decodes rows of different lengths together, padded on the left.

    With `bits` one row at a time keeps its keys and values in so many, in groups of `group_size`.
    """

    batched: bool
    bits: int | None = None
    group_size: int = 64


def generate(
    loaded: Loaded, prompts: Sequence[Tokens], sampling: Sampling, *, how: Decoding
) -> Iterator[list[int | None]]:
    """Each step's token of every prompt, None for a row that has ended; ends when all have."""
    if not prompts:
        return
    assert all(len(prompt) for prompt in prompts), "a prompt has at least one token"
    rows = list(range(len(prompts)))
    groups = [
        _Group(_Decoder(loaded, [prompts[n] for n in numbers], how), numbers, sampling)
        for numbers in ([rows] if how.batched else [[row] for row in rows])
    ]
    yield from in_step(groups, len(prompts), sampling.max_tokens)


def quantized_decoding(loaded: Loaded, bits: int) -> Decoding:
    """Keys and values in 2 to 8 bits. Raises ModelError where mlx-lm does not: it is tried."""
    for group_size in (64, 32):
        how = Decoding(batched=False, bits=bits, group_size=group_size)
        try:
            decoder = _Decoder(loaded, [np.array(probe_tokens(loaded.network, 3))[0]], how)
            mx.eval(decoder.read(), decoder.read(mx.array([[1]])))
        except FAULTS:
            continue
        return how
    raise ModelError(
        f"mlx-lm cannot keep this model's keys and values in {bits} bits",
        "leave --cache-bits out, or choose 2, 3, 4, 6 or 8",
    )


def decodes_together(loaded: Loaded) -> bool:
    """Whether rows padded on the left give the logits that each gives alone: it is tried."""
    prompts = [np.array(probe_tokens(loaded.network, n, seed=n))[0] for n in (3, 7)]
    try:
        together = _Decoder(loaded, prompts, Decoding(batched=True))
        first_BV, second_BV = together.read(), together.read(mx.array([[1], [2]]))
    except FAULTS:
        return False
    for row, prompt in enumerate(prompts):
        alone = _Decoder(loaded, [prompt], Decoding(batched=False))
        wanted = alone.read(), alone.read(mx.array([[row + 1]]))
        for ours_BV, wanted_BV in zip((first_BV, second_BV), wanted, strict=True):
            if not close(ours_BV[row : row + 1], wanted_BV):
                return False
    return True


class _Decoder:
    """Rows and their caches. One row has the model's own, several share padded ones."""

    def __init__(self, loaded: Loaded, prompts: Sequence[Tokens], how: Decoding) -> None:
        self.network, self.head, self.how = loaded.network, loaded.head, how
        longest = max(len(prompt) for prompt in prompts)
        padding = [longest - len(prompt) for prompt in prompts]
        tokens = np.zeros((len(prompts), longest), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, padding[row] :] = prompt
        self.prompt_BT = mx.array(tokens)
        own = make_prompt_cache(self.network)
        self.cache = own if len(prompts) == 1 else [_shared(cache, padding) for cache in own]

    def read(self, tokens_BT: mx.array | None = None) -> mx.array:
        """The logits after the last token, (B, V) float32."""
        tokens_BT = self.prompt_BT if tokens_BT is None else tokens_BT
        if self.head is None:
            logits_BV = self.network(tokens_BT, cache=self.cache)[:, -1].astype(mx.float32)
        else:  # the prompt's other positions need no logits
            hidden_BTD = hidden_states(self.network, tokens_BT, self.cache)
            logits_BV = self.head.logits(hidden_BTD[:, -1])
        if self.how.bits and tokens_BT is self.prompt_BT:  # which was read from exact keys
            rule = self.how.group_size, self.how.bits
            self.cache = [cache.to_quantized(*rule) for cache in self.cache]
        return logits_BV

    def keep(self, rows: list[int]) -> None:
        """Forget the other rows."""
        for cache in self.cache:
            cache.filter(mx.array(rows))


def _shared(cache: Any, padding: list[int]) -> Any:
    """The cache of several rows for a cache of one. Raises TypeError for a kind without one."""
    if type(cache) is KVCache:
        return BatchKVCache(padding)
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return BatchRotatingKVCache(cache.max_size, padding)
    raise TypeError(type(cache).__name__)


class _Group:
    """Rows decoded together; ended rows leave the batch."""

    def __init__(self, decoder: _Decoder, numbers: list[int], sampling: Sampling) -> None:
        self.decoder, self.sampling, self.numbers = decoder, sampling, numbers
        self.draws = {n: np.random.default_rng((sampling.seed, n)) for n in numbers}
        self.left = sampling.max_tokens
        # A GPU works on the token after the next one while the host looks at the next.
        self.looks_ahead = sampling.temperature == 0 and mx.default_device() != mx.cpu
        self.last_B: mx.array | None = None
        self.ids_B: mx.array | None = None

    def step(self) -> list[tuple[int, int]]:
        """(row, token) of the rows that go on after this step."""
        if not self.numbers:
            return []
        ids_B = self._next(self.last_B) if self.ids_B is None else self.ids_B
        self.left -= 1
        ahead_B = self._next(ids_B) if self.looks_ahead and self.left else None
        picked: Any = ids_B.tolist()
        going = [i for i, token in enumerate(picked) if token not in self.sampling.stop]
        out = [(self.numbers[i], picked[i]) for i in going]
        if going and len(going) < len(picked):
            self.decoder.keep(going)
            ids_B = ids_B[mx.array(going)]
            ahead_B = None if ahead_B is None else ahead_B[mx.array(going)]
        self.numbers = [self.numbers[i] for i in going]
        self.last_B, self.ids_B = ids_B, ahead_B
        return out

    def _next(self, last_B: mx.array | None) -> mx.array:
        """The tokens that follow these; those that follow the prompts for None."""
        logits_BV = self.decoder.read(None if last_B is None else last_B[:, None])
        if self.sampling.temperature == 0:
            next_B = mx.argmax(logits_BV, axis=-1).astype(mx.int32)
            mx.async_eval(next_B)
            return next_B
        draws = [self.draws[n].random() for n in self.numbers]
        return mx.array(sample(np.array(logits_BV), draws, self.sampling), dtype=mx.int32)
