"""The figures of a decoder that its modules need: sizes, scales, windows, and rotary tables.

Shape letters: B batch (1), T tokens, S slots of the cache (the context), C head channels.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pippin.model.config import ModelConfig
from pippin.targets.families import GEMMAS, windows_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The numbers of a decoder.

    `windows` are how many tokens back each layer attends, None for all; `score_cap` and `logit_cap`
    are Gemma 2's, None for none.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    context: int
    attention_scale: float
    windows: tuple[int | None, ...]
    is_gemma: bool
    embed_scale: float
    score_cap: float | None
    logit_cap: float | None

    @property
    def kinds(self) -> tuple[int | None, ...]:
        """The different windows, in the order in which layers have them."""
        return tuple(dict.fromkeys(self.windows))


def read_shape(config: ModelConfig, context: int) -> Shape:
    """The numbers of a config; context in tokens."""
    raw, is_gemma = config.raw, config.model_type in GEMMAS
    return Shape(
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        context=context,
        attention_scale=raw.get("query_pre_attn_scalar", config.head_dim) ** -0.5,
        windows=windows_of(config),
        is_gemma=is_gemma,
        embed_scale=config.hidden_size**0.5 if is_gemma else 1.0,
        score_cap=raw.get("attn_logit_softcapping"),
        logit_cap=raw.get("final_logit_softcapping"),
    )


def rope_tables(path: Path, context: int, window: int | None) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, (S, C) float32 each, scaled as the model's rope type asks.

    Gemma 3's layers with a window turn faster than the others.
    """
    from transformers import AutoConfig
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = AutoConfig.from_pretrained(path, local_files_only=True)
    given = (torch.zeros(1), torch.arange(context)[None])
    if config.model_type == "gemma3_text":
        kind = "full_attention" if window is None else "sliding_attention"
        cos_BSC, sin_BSC = Gemma3RotaryEmbedding(config)(*given, kind)
    else:
        cos_BSC, sin_BSC = LlamaRotaryEmbedding(config)(*given)
    return cos_BSC[0].clone(), sin_BSC[0].clone()
