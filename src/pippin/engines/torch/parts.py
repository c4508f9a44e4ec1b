"""A decoder layer of Llama's shape taken apart into linears and norms, or why it cannot be.

Shape letters: D hidden.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from pippin.engines.torch.dora import DoraLinear
from pippin.engines.torch.lora import LoraLinear

PARTS = {
    "": {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"},
    "self_attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "mlp": {"gate_proj", "up_proj", "down_proj", "act_fn"},
}


class Norm(NamedTuple):
    """An RMS norm's weight (D,) and epsilon."""

    weight_D: Tensor
    eps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Linears by the inputs they read: key, query, value; output; gate, up; down.

    `window` is None for plain causal attention.
    """

    norms: tuple[Norm, Norm]
    linears: tuple[list[Any], list[Any], list[Any], list[Any]]
    channels: int
    scale: float
    window: int | None

    @property
    def heads(self) -> tuple[int, int]:
        """Of queries, and of keys and values."""
        key, query, _ = self.linears[0]
        return query.out_features // self.channels, key.out_features // self.channels


def take_apart(layer: nn.Module) -> Parts | str:
    """The parts of a layer whose linears and norms are frozen; else a reason, in words."""
    for name, wanted in PARTS.items():
        found = {child for child, _ in _child(layer, name).named_children()}
        if not found <= wanted or not wanted - {"act_fn"} <= found:
            return f"{type(layer).__name__} has other parts than Llama's"
    whole: Any = layer
    attention, mlp = whole.self_attn, whole.mlp
    linears = (
        [attention.k_proj, attention.q_proj, attention.v_proj],  # q and v, often adapted, adjoin
        [attention.o_proj],
        [mlp.gate_proj, mlp.up_proj],
        [mlp.down_proj],
    )
    norms = (whole.input_layernorm, whole.post_attention_layernorm)
    if getattr(attention, "attention_dropout", 0.0):
        return "its attention drops weights"
    fault = _unfit_linears([linear for group in linears for linear in group])
    if fault or not all(map(_frozen, norms)):
        return fault or "its norms are trained or of their own kind"
    return Parts(
        norms=(_norm(norms[0]), _norm(norms[1])),
        linears=linears,
        channels=attention.head_dim,
        scale=attention.scaling,
        window=_window(attention),
    )


def _child(layer: nn.Module, name: str) -> nn.Module:
    return getattr(layer, name, nn.Module()) if name else layer


def _unfit_linears(linears: list[Any]) -> str | None:
    for linear in linears:
        plain = isinstance(linear, nn.Linear | LoraLinear) and linear.weight is not None
        if not plain or linear.weight.requires_grad:
            return "its linears are trained or of their own kind"
        if isinstance(linear, DoraLinear):
            return "its adapters rescale outputs"
        if getattr(linear, "dropout", 0.0):
            return "its adapters drop inputs"
    scales = {linear.scale for linear in linears if isinstance(linear, LoraLinear)}
    return "its adapters differ in scale" if len(scales) > 1 else None


def _frozen(norm: Any) -> bool:
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", None)
    return weight is not None and eps is not None and not weight.requires_grad


def _norm(module: Any) -> Norm:
    return Norm(module.weight, module.variance_epsilon)


def _window(attention: Any) -> int | None:
    """Where a layer has no window of its own, the network's."""
    return getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
