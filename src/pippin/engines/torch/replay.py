"""Decoding on CUDA as one recorded graph: the host sends off a step, not its thousand kernels.

Shape letters: B rows, H heads, K kv heads, G heads a kv head, C channels, L places, V vocabulary.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel

from pippin.engines.torch.attention import rule_of

NAME = "pippin_replay"
STEP = 64  # the number of places is a multiple of it


class Replay:
    """Steps of one token a row, from a transformers cache on: the first does its newest step again.

    Keys and values lie in buffers of a fixed length, so every step is the same work. Rows that have
    ended are computed along: a step reads every weight whatever their number.
    """

    def __init__(
        self, network: PreTrainedModel, cache: Any, real_BT: Tensor | None, most: int
    ) -> None:
        """Room for `most` steps. `real_BT` is 0 where the prompts are padded, None where not."""
        _register()
        self.network = network
        rows, filled = cache.layers[0].keys.shape[0], cache.get_seq_length()
        places = -(-(filled + most) // STEP) * STEP
        self.layers = [tuple(_grown(x, places) for x in (c.keys, c.values)) for c in cache.layers]
        make: Any = functools.partial(torch.zeros, dtype=torch.int64, device=network.device)
        self.tokens_B1, self.positions_B1, self.place_1 = make(rows, 1), make(rows, 1), make(1)
        self.place_1 += filled - 2
        self.real_BL = make(rows, places) == 0
        if real_BT is not None:
            self.real_BL[:, :filled] = real_BT.bool()
        self.number_L = torch.arange(places, device=network.device)
        self.logits_BV = make(0)
        self.graph: Any = None

    def step(self, rows: list[int], tokens_B1: Tensor, positions_B1: Tensor) -> Tensor:
        """The logits after these tokens of these rows, (B, V)."""
        self.tokens_B1[rows], self.positions_B1[rows] = tokens_B1, positions_B1
        self.place_1 += 1
        if self.graph is None:
            self._forward()
        else:
            self.graph.replay()
        return self.logits_BV[rows]

    def record(self) -> None:
        """From now on a step is one launch. Nothing is computed here."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._forward()
        self.graph = graph

    def _forward(self) -> None:
        own = self.network.config._attn_implementation
        self.network.set_attn_implementation(NAME)
        try:
            out = self.network(
                input_ids=self.tokens_B1,
                position_ids=self.positions_B1,
                use_cache=False,
                logits_to_keep=1,
                replay=self,
            )
        finally:
            self.network.set_attn_implementation(own)
        self.logits_BV = out.logits[:, -1]

    def attend(self, layer: int, qkv: tuple[Tensor, ...], scale: float) -> Tensor:
        """(B, H, 1, C) and (B, K, 1, C) -> (B, 1, H, C), over what the buffers hold by then."""
        query, *pair = qkv
        for buffer_BKLC, new_BK1C in zip(self.layers[layer], pair, strict=True):
            buffer_BKLC.index_copy_(2, self.place_1, new_BK1C)
        keys_BKLC, values_BKLC = self.layers[layer]
        rows, kv = keys_BKLC.shape[:2]
        seen_BL = self.real_BL & (self.number_L <= self.place_1)
        out_BKGC = functional.scaled_dot_product_attention(
            query.reshape(rows, kv, -1, query.shape[-1]),
            keys_BKLC,
            values_BKLC,
            attn_mask=seen_BL[:, None, None],
            scale=scale,
        )
        return out_BKGC.reshape(rows, 1, -1, out_BKGC.shape[-1])


def fits(network: PreTrainedModel, cache: Any) -> bool:
    """Whether the network and its cache are of the plain kind, as far as their names tell."""
    kinds = {type(layer).__name__ for layer in getattr(cache, "layers", ())}
    return kinds == {"DynamicLayer"} and getattr(network, "_supports_attention_backend", False)


def _grown(x_BKTC: Tensor, places: int) -> Tensor:
    rows, kv, filled, channels = x_BKTC.shape
    out_BKLC = x_BKTC.new_zeros(rows, kv, places, channels)
    out_BKLC[:, :, :filled] = x_BKTC
    return out_BKLC


@functools.cache
def _register() -> None:
    """Make `NAME` known to transformers. It has no mask function, so no mask is ever built."""
    AttentionInterface.register(NAME, _attention)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    replay: Replay | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature."""
    rule = rule_of(query, kwargs)
    if replay is None or not rule.plain or rule.window is not None:
        raise RuntimeError(f"attention of {type(module).__name__} cannot be recorded")
    return replay.attend(module.layer_idx, (query, key, value), rule.scale), None
