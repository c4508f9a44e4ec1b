"""A model's config.json as the numbers the decoder needs; what it cannot compute is refused."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pippin.engines.jax.rope import Rope, make_rope
from pippin.errors import ModelError, first_line

FAMILIES = {
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 (text)",
    "llama": "Llama 2 and 3, SmolLM2, OpenLLaMA",
    "mistral": "Mistral",
    "qwen2": "Qwen 2 and 2.5",
    "qwen3": "Qwen 3",
}
EVERYWHERE = 1 << 30  # the window of a layer that sees all of its past
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """One decoder, hashable: what compiled code is specialised on.

    `windows` and `rope_of` (an index into `ropes`) are by layer. `biases` are the linears of a
    layer that have one. `gemma_norms` are scaled by 1 + weight, in float32. Rope turns channel i
    with i + C/2, or with its neighbour where it is `interleaved`.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    eps: float
    activation: str
    scale: float
    windows: tuple[int, ...]
    ropes: tuple[Rope, ...]
    rope_of: tuple[int, ...]
    tied: bool
    biases: tuple[str, ...] = ()
    qk_norms: bool = False
    post_norms: bool = False
    gemma_norms: bool = False
    interleaved: bool = False
    embed_scale: float = 1.0
    softcap: float | None = None
    head_softcap: float | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors of one layer, by their names within it."""
        d, f = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (q, d),
            "self_attn.k_proj.weight": (kv, d),
            "self_attn.v_proj.weight": (kv, d),
            "self_attn.o_proj.weight": (d, q),
            "mlp.gate_proj.weight": (f, d),
            "mlp.up_proj.weight": (f, d),
            "mlp.down_proj.weight": (d, f),
        }
        shapes |= {f"{name}.bias": shapes[f"{name}.weight"][:1] for name in self.biases}
        norms = ["input_layernorm", "post_attention_layernorm"]
        if self.post_norms:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        shapes |= {f"{name}.weight": (d,) for name in norms}
        if self.qk_norms:
            shapes |= {f"self_attn.{part}_norm.weight": (self.head_dim,) for part in "qk"}
        return shapes


def read_spec(folder: Path) -> Spec:
    """The decoder of a model folder. Raises ModelError for a family that the engine lacks."""
    config = _read_config(folder)
    family = config.model_type
    if family not in FAMILIES or config.activation not in _ACTIVATIONS:
        known = "; ".join(f"{name} ({text})" for name, text in FAMILIES.items())
        raise ModelError(
            f"{folder}: the engine jax has no decoder for {family or 'this config'}"
            + (f" with {config.activation}" if family in FAMILIES else ""),
            f"it loads {known}; use engine torch",
        )
    return _spec(config, family)


@dataclass(slots=True)
class _Config:
    """transformers' config of the folder, every default of the family filled in."""

    values: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.values, name, None)

    @property
    def activation(self) -> str:
        return self.hidden_activation or self.hidden_act or "silu"


def _read_config(folder: Path) -> _Config:
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json", "give a folder in Hugging Face's layout")
    try:
        read = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        raise ModelError(
            f"{folder}: its config.json cannot be read: {first_line(error)}",
            "choose a model of a family that the engine knows, or use engine torch",
        ) from error
    return _Config(read)


def _spec(config: _Config, family: str) -> Spec:
    gemma = family.startswith("gemma")
    channels = config.head_dim or config.hidden_size // config.num_attention_heads
    kinds, windows = _windows(config)
    names = sorted(set(kinds))
    ropes = [make_rope(_rope(config, n), channels, config.max_position_embeddings) for n in names]
    return Spec(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=channels,
        vocab_size=config.vocab_size,
        eps=config.rms_norm_eps,
        activation=_ACTIVATIONS[config.activation],
        scale=(config.query_pre_attn_scalar or channels) ** -0.5,
        windows=windows,
        ropes=tuple(ropes),
        rope_of=tuple(names.index(kind) for kind in kinds),
        tied=bool(config.tie_word_embeddings),
        biases=_biases(config, family),
        qk_norms=family in ("qwen3", "gemma3_text"),
        post_norms=family in ("gemma2", "gemma3_text"),
        gemma_norms=gemma,
        embed_scale=config.hidden_size**0.5 if gemma else 1.0,
        softcap=config.attn_logit_softcapping,
        head_softcap=config.final_logit_softcapping,
    )


def _windows(config: _Config) -> tuple[list[str], tuple[int, ...]]:
    """The kind of every layer, and how many tokens it sees, itself included."""
    count, window = config.num_hidden_layers, config.sliding_window
    kinds = list(
        config.layer_types or ["sliding_attention" if window else "full_attention"] * count
    )
    strange = set(kinds) - {"sliding_attention", "full_attention"}
    if strange:
        raise ModelError(
            f"the engine jax has no layers of kind {', '.join(sorted(strange))}", "use engine torch"
        )
    sliding = [kind == "sliding_attention" and bool(window) for kind in kinds]
    return kinds, tuple(window if slides else EVERYWHERE for slides in sliding)


def _rope(config: _Config, kind: str) -> dict[str, Any]:
    figures = config.rope_parameters
    return figures[kind] if isinstance(figures.get(kind), dict) else figures


def _biases(config: _Config, family: str) -> tuple[str, ...]:
    attention = [f"self_attn.{part}_proj" for part in "qkv"]
    if family != "qwen2":
        attention = [*attention, "self_attn.o_proj"] if config.attention_bias else []
    mlp = [f"mlp.{part}_proj" for part in ("gate", "up", "down")] if config.mlp_bias else []
    return tuple(attention + mlp)
