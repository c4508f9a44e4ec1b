"""How a network is called: its body for hidden states, its head apart, checked against forward.

Shape letters: B rows, T tokens, D hidden, V vocabulary.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pippin.engines.torch.loss import Head


def body(network: PreTrainedModel) -> nn.Module:
    """The part below the head."""
    return network.get_decoder() if hasattr(network, "get_decoder") else network.base_model


def hidden_states(network: PreTrainedModel, tokens_BT: Tensor, **extra: Any) -> Tensor:
    """(B, T, D) after the last norm: what the head reads."""
    return body(network)(input_ids=tokens_BT, use_cache=False, **extra).last_hidden_state


def find_head(network: PreTrainedModel) -> Head | None:
    """The head as a plain product, or None where its logits differ from the model's own.

    The formula is tried on a few tokens: no list of architectures decides.
    """
    head = plain_head(network)
    return head if head is not None and _agrees(network, head) else None


def plain_head(network: PreTrainedModel) -> Head | None:
    """The same, untried; None where the head is no linear."""
    linear = network.get_output_embeddings()
    if not isinstance(linear, nn.Linear):
        return None
    config = network.config.get_text_config()
    return Head(
        weight_VD=linear.weight,
        bias_V=linear.bias,
        scale=_scale(config),
        softcap=getattr(config, "final_logit_softcapping", None),
    )


def _scale(config: Any) -> float:
    """Cohere multiplies its logits, Granite divides them."""
    if getattr(config, "logits_scaling", None):
        return 1.0 / config.logits_scaling
    return getattr(config, "logit_scale", None) or 1.0


@torch.no_grad()
def _agrees(network: PreTrainedModel, head: Head) -> bool:
    tokens_BT = probe_tokens(network, 8)
    wanted = network(input_ids=tokens_BT, use_cache=False).logits.to(torch.float32)
    ours = head.logits(hidden_states(network, tokens_BT)[0])[None].to(torch.float32)
    return wanted.shape == ours.shape and close(ours, wanted, network.dtype)


def probe_tokens(network: PreTrainedModel, count: int, seed: int = 0) -> Tensor:
    """(1, count) tokens drawn from a seed, to compare two ways of computing one thing."""
    embedding: Any = network.get_input_embeddings()
    vocab = int(embedding.weight.shape[0])
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (1, count), generator=generator).to(network.device)


def close(ours: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    """Whether two computations of one thing differ by rounding alone."""
    tolerance = 1e-3 if dtype in (torch.float32, torch.float64) else 6e-2
    return bool((ours - wanted).abs().max() <= tolerance * wanted.abs().max())


def cache_argument(network: PreTrainedModel) -> str:
    """The name under which forward takes a KV cache; it changed within transformers 5."""
    names = inspect.signature(network.forward).parameters
    return next(n for n in ("cache", "past_key_values", "cache_params") if n in names)
