"""How a network is called: its body for hidden states, its head apart, checked against forward.

Shape letters: B rows, T tokens, D hidden, V vocabulary, C positions of one chunk.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from pippin.errors import ModelError

CHUNK_BYTES = 1 << 26
BODIES = ("model", "transformer", "backbone")
EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings")
HEADS = ("lm_head", "embed_out", "output")


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Head:
    """logits = softcap * tanh(scale * product(h) / softcap); softcap None leaves it out.

    `module` is a linear, or the embedding where `tied`; dense or quantized.
    """

    module: Any
    tied: bool
    vocab: int
    scale: float = 1.0
    softcap: float | None = None

    def products(self, hidden_CD: mx.array) -> mx.array:
        """(C, V) in the model's dtype."""
        return self.module.as_linear(hidden_CD) if self.tied else self.module(hidden_CD)

    def finish(self, products_CV: mx.array) -> mx.array:
        """From products to logits, in float32."""
        logits_CV = products_CV.astype(mx.float32)
        if self.scale != 1.0:
            logits_CV = logits_CV * self.scale
        if self.softcap is not None:
            logits_CV = mx.tanh(logits_CV / self.softcap) * self.softcap
        return logits_CV

    def logits(self, hidden_CD: mx.array) -> mx.array:
        """(C, V) in float32."""
        return self.finish(self.products(hidden_CD))

    def slope(self, logits_CV: mx.array) -> Any:
        """d logits / d products, from the finished logits."""
        if self.softcap is None:
            return self.scale
        return (1 - (logits_CV / self.softcap) ** 2) * self.scale

    @property
    def weight(self) -> mx.array | None:
        """The dense weight (V, D); None where it is quantized or a bias comes with it."""
        dense = type(self.module).__name__ in ("Linear", "Embedding")
        return self.module.weight if dense and "bias" not in self.module else None

    @property
    def chunk(self) -> int:
        """Positions at a time: float32 logits of about 64 MiB."""
        return max(16, CHUNK_BYTES // (4 * self.vocab))


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Loaded:
    """A network with what was found out about it.

    `head` is None where the logits are no plain product; `longest` is the longest row that is
    computed as transformers computes it, None for any.
    """

    network: nn.Module
    head: Head | None
    longest: int | None
    notices: tuple[str, ...]

    def refuse_long(self, tokens: int) -> None:
        """Raise ModelError where mlx-lm leaves out an attention window that matters."""
        if self.longest is not None and tokens > self.longest:
            raise ModelError(
                f"{tokens} tokens exceed the attention window of {self.longest}, which mlx-lm "
                "leaves out for this model",
                f"keep rows within {self.longest} tokens, or set model.engine = torch",
            )


def body(network: nn.Module) -> Any:
    """The part below the head."""
    return _part(network, BODIES)


def embedding(network: nn.Module) -> Any:
    """The token embedding."""
    return _part(body(network), EMBEDDINGS)


def _part(network: nn.Module, known: tuple[str, ...]) -> Any:
    for name in known:
        if name in network:
            return network[name]
    raise ModelError(
        f"mlx-lm's {type(network).__module__.rpartition('.')[2]} has none of {', '.join(known)}",
        "set model.engine = torch",
    )


def hidden_states(network: nn.Module, tokens_BT: mx.array, cache: Any = None) -> mx.array:
    """(B, T, D) after the last norm: what the head reads."""
    return body(network)(tokens_BT, cache=cache)


def find_head(network: nn.Module, config: dict[str, Any]) -> Head | None:
    """The head as a plain product, or None where its logits differ from the model's own.

    The formula is tried on a few tokens: no list of architectures decides.
    """
    try:
        head = plain_head(network, config)
        return head if _agrees(network, head) else None
    except (ModelError, TypeError, AttributeError, ValueError):
        return None


def plain_head(network: nn.Module, config: dict[str, Any]) -> Head:
    """The head as a plain product, untried."""
    own = next((network[name] for name in HEADS if name in network), None)
    return Head(
        module=embedding(network) if own is None else own,
        tied=own is None,
        vocab=vocabulary(network),
        scale=_scale(config),
        softcap=config.get("final_logit_softcapping"),
    )


def _scale(config: dict[str, Any]) -> float:
    """Cohere multiplies its logits, Granite divides them."""
    if config.get("logits_scaling"):
        return 1.0 / config["logits_scaling"]
    return config.get("logit_scale") or 1.0


def _agrees(network: nn.Module, head: Head) -> bool:
    tokens_BT = probe_tokens(network, 8)
    wanted = network(tokens_BT)
    ours = head.logits(hidden_states(network, tokens_BT)[0])[None]
    return wanted.shape == ours.shape and close(ours, wanted)


def vocabulary(network: nn.Module) -> int:
    """Rows of the embedding, quantized or not."""
    return embedding(network).weight.shape[0]


def probe_tokens(network: nn.Module, count: int, seed: int = 0) -> mx.array:
    """(1, count) tokens drawn from a seed, to compare two ways of computing one thing."""
    rng = np.random.default_rng(seed)
    return mx.array(rng.integers(0, vocabulary(network), (1, count)).astype(np.int32))


def close(ours: mx.array, wanted: mx.array) -> bool:
    """Whether two computations of one thing differ by rounding alone; a GPU may round float32."""
    exact = ours.dtype == wanted.dtype == mx.float32 and mx.default_device() == mx.cpu
    difference = mx.abs(ours.astype(mx.float32) - wanted.astype(mx.float32)).max()
    return bool(difference <= (1e-3 if exact else 6e-2) * mx.abs(wanted).max())


def scalar(array: mx.array) -> float:
    """The one number in an array, on the host."""
    value: Any = array.item()
    return float(value)
