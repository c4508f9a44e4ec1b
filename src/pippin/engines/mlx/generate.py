"""Batched decoding with a KV cache: prompts of different lengths, exact row by row.

Shape letters: B rows, T tokens of the longest prompt, D hidden, V vocabulary.
"""

from collections.abc import Iterator, Sequence
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
from pippin.engines.sampling import sample


def generate(
    loaded: Loaded, prompts: Sequence[Tokens], sampling: Sampling, *, batched: bool
) -> Iterator[list[int | None]]:
    """Each step's token of every prompt, None for a row that has ended; ends when all have.

    `batched` decodes rows of different lengths together, padded on the left.
    """
    if not prompts:
        return
    assert all(len(prompt) for prompt in prompts), "a prompt has at least one token"
    rows = list(range(len(prompts)))
    groups = [
        _Group(loaded, [prompts[n] for n in numbers], numbers, sampling)
        for numbers in ([rows] if batched else [[row] for row in rows])
    ]
    for _ in range(sampling.max_tokens):
        step: list[int | None] = [None] * len(prompts)
        for group in groups:
            for row, token in group.step():
                step[row] = token
        if all(token is None for token in step):
            return
        yield step


def decodes_together(loaded: Loaded) -> bool:
    """Whether rows padded on the left give the logits that each gives alone: it is tried."""
    prompts = [np.array(probe_tokens(loaded.network, n, seed=n))[0] for n in (3, 7)]
    try:
        together = _Decoder(loaded, prompts)
        first_BV, second_BV = together.read(), together.read(mx.array([[1], [2]]))
    except FAULTS:
        return False
    for row, prompt in enumerate(prompts):
        alone = _Decoder(loaded, [prompt])
        wanted = alone.read(), alone.read(mx.array([[row + 1]]))
        for ours_BV, wanted_BV in zip((first_BV, second_BV), wanted, strict=True):
            if not close(ours_BV[row : row + 1], wanted_BV):
                return False
    return True


class _Decoder:
    """Rows and their caches. One row has the model's own, several share padded ones."""

    def __init__(self, loaded: Loaded, prompts: Sequence[Tokens]) -> None:
        self.network, self.head = loaded.network, loaded.head
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
        mx.eval(logits_BV)
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

    def __init__(
        self, loaded: Loaded, prompts: list[Tokens], numbers: list[int], sampling: Sampling
    ) -> None:
        self.decoder, self.sampling, self.numbers = _Decoder(loaded, prompts), sampling, numbers
        self.draws = {n: np.random.default_rng((sampling.seed, n)) for n in numbers}
        self.tokens_BT: mx.array | None = None

    def step(self) -> list[tuple[int, int]]:
        """(row, token) of the rows that go on after this step."""
        if not self.numbers:
            return []
        picked = self._pick(self.decoder.read(self.tokens_BT))
        going = [i for i, token in enumerate(picked) if token not in self.sampling.stop]
        out = [(self.numbers[i], picked[i]) for i in going]
        if going and len(going) < len(picked):
            self.decoder.keep(going)
        self.numbers = [self.numbers[i] for i in going]
        self.tokens_BT = mx.array([[picked[i]] for i in going], dtype=mx.int32)
        return out

    def _pick(self, logits_BV: mx.array) -> list[int]:
        if self.sampling.temperature == 0:
            ids: Any = mx.argmax(logits_BV, axis=-1).tolist()
            return ids
        draws = [self.draws[n].random() for n in self.numbers]
        return sample(np.array(logits_BV), draws, self.sampling)
