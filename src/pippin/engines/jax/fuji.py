"""AXLearn's Fuji models: their shapes by name, and their tensors to and from Hugging Face's names.

Fuji is Llama with rope over neighbouring channels and fused projections (AXLearn's
experiments/text/gpt/fuji.py). Shape letters: L layers, D hidden, F feed-forward, H heads, K kv
heads, C head channels, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pippin.engines.jax.architecture import EVERYWHERE, Spec
from pippin.engines.jax.load import TOP, layer_name
from pippin.engines.jax.rope import make_rope
from pippin.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """What all sizes of a version share."""

    vocab_size: int
    positions: int
    theta: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """One size. `kv_heads` holds from version `grouped_from` on; before, none are grouped."""

    versions: tuple[str, ...]
    layers: int
    hidden: int
    heads: int
    ffn: int
    kv_heads: int = 8
    grouped_from: str = "V3"
    tied: bool = True


VERSIONS = {
    "V1": Version(vocab_size=32768, positions=2048, theta=1e4),
    "V2": Version(vocab_size=32768, positions=4096, theta=1e4),
    "V3": Version(vocab_size=131072, positions=8192, theta=5e5),
}
SIZES = {
    "test": Size(versions=("V1", "V2", "V3"), layers=4, hidden=64, heads=4, ffn=176, kv_heads=2),
    "1B": Size(versions=("V3",), layers=16, hidden=2048, heads=32, ffn=8192),
    "3B": Size(versions=("V3",), layers=28, hidden=3072, heads=24, ffn=8192),
    "7B": Size(versions=("V1", "V2", "V3"), layers=32, hidden=4096, heads=32, ffn=11008),
    "8B": Size(versions=("V3",), layers=32, hidden=4096, heads=32, ffn=14336, tied=False),
    "70B": Size(
        versions=("V1", "V2", "V3"),
        layers=80,
        hidden=8192,
        heads=64,
        ffn=28672,
        grouped_from="V2",
        tied=False,
    ),
    "405B": Size(versions=("V3",), layers=126, hidden=16384, heads=128, ffn=53248, tied=False),
}
_LAYER = "decoder/transformer/repeat/layer"
_QKV = f"{_LAYER}/self_attention/attention/i_proj/i_proj/qkv_proj/weight"
_OUT = f"{_LAYER}/self_attention/attention/o_proj/weight"
_HEAD = "decoder/lm_head/weight"
_NORMS = {
    f"{_LAYER}/self_attention/norm/scale": "input_layernorm.weight",
    f"{_LAYER}/feed_forward/norm/scale": "post_attention_layernorm.weight",
}
_FEED_FORWARD = {
    f"{_LAYER}/feed_forward/linear1_0/weight": "mlp.gate_proj.weight",
    f"{_LAYER}/feed_forward/linear1_1/weight": "mlp.up_proj.weight",
    f"{_LAYER}/feed_forward/linear2/weight": "mlp.down_proj.weight",
}


def fuji_spec(name: str) -> Spec:
    """The decoder of `7B` (its first version) or `7B-V3`. Raises UsageError for another name."""
    size_name, _, version_name = name.partition("-")
    size = SIZES.get(size_name)
    version_name = version_name or (size.versions[0] if size else "")
    if size is None or version_name not in size.versions:
        known = ", ".join(f"{n} ({'/'.join(s.versions)})" for n, s in SIZES.items())
        raise UsageError(f"there is no Fuji {name}", f"there are {known}; 7B-V3 names a version")
    version = VERSIONS[version_name]
    channels = size.hidden // size.heads
    rope = make_rope({"rope_theta": version.theta}, channels, version.positions)
    return Spec(
        num_layers=size.layers,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_heads=size.heads,
        num_kv_heads=size.kv_heads if version_name >= size.grouped_from else size.heads,
        head_dim=channels,
        vocab_size=512 if size_name == "test" else version.vocab_size,
        eps=1e-5,
        activation="silu",
        scale=channels**-0.5,
        windows=(EVERYWHERE,) * size.layers,
        ropes=(rope,),
        rope_of=(0,) * size.layers,
        tied=size.tied,
        interleaved=True,
    )


def hf_to_fuji(spec: Spec, tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Hugging Face's tensors of a Llama as Fuji's, layers stacked; exact, nothing is rounded.

    Query and key channels of a head are reordered (0, C/2, 1, C/2 + 1, ...): rope turns neighbours.
    """
    order, _ = _orders(spec)
    q, k, v = (
        _heads(spec, _stacked(spec, tensors, f"self_attn.{part}_proj.weight")) for part in "qkv"
    )
    q, k = q[..., order], k[..., order]
    if spec.num_kv_heads == spec.num_heads:
        qkv = np.stack([q, k, v], 1)  # (L, 3, D, H, C)
    else:
        qkv = np.concatenate([q, k, v], 2)  # (L, D, H + 2K, C)
    out = _stacked(spec, tensors, "self_attn.o_proj.weight")
    named = {_QKV: qkv, _OUT: out.reshape(*out.shape[:2], spec.num_heads, spec.head_dim)}
    named |= {fuji: _stacked(spec, tensors, hf) for fuji, hf in _NORMS.items()}
    named |= {
        fuji: np.swapaxes(_stacked(spec, tensors, hf), 1, 2) for fuji, hf in _FEED_FORWARD.items()
    }
    named["decoder/emb/token_emb/weight"] = tensors[TOP["embed"]]
    named["decoder/output_norm/scale"] = tensors[TOP["norm"]]
    return named if spec.tied else {**named, _HEAD: tensors[TOP["head"]]}


def fuji_to_hf(spec: Spec, tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The inverse of `hf_to_fuji`."""
    _, back = _orders(spec)
    layers = _fuji_layers(spec, tensors)
    for part in "qk":
        name = f"self_attn.{part}_proj.weight"
        split = layers[name].reshape(spec.num_layers, -1, spec.head_dim, spec.hidden_size)
        layers[name] = split[:, :, back].reshape(layers[name].shape)
    named = {
        layer_name(number, name): stack[number]
        for name, stack in layers.items()
        for number in range(spec.num_layers)
    }
    named |= {TOP[key]: array for key, array in _fuji_top(spec, tensors).items()}
    return named


def fuji_params(spec: Spec, tensors: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Fuji's tensors as the decoder takes them: channels stay where they are."""
    return {**_fuji_top(spec, tensors), "layers": _fuji_layers(spec, tensors)}


def _fuji_top(spec: Spec, tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    top = {
        "embed": tensors["decoder/emb/token_emb/weight"],
        "norm": tensors["decoder/output_norm/scale"],
    }
    return top if spec.tied else {**top, "head": tensors[_HEAD]}


def _fuji_layers(spec: Spec, tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """By name within a layer, (L, outputs, inputs)."""
    qkv, h, k = tensors[_QKV], spec.num_heads, spec.num_kv_heads
    parts = list(np.moveaxis(qkv, 1, 0)) if k == h else np.split(qkv, [h, h + k], 2)
    shape = spec.num_layers, -1, spec.hidden_size
    layers = {
        f"self_attn.{name}_proj.weight": np.moveaxis(part, 1, 3).reshape(shape)
        for name, part in zip("qkv", parts, strict=True)
    }
    layers["self_attn.o_proj.weight"] = tensors[_OUT].reshape(*tensors[_OUT].shape[:2], -1)
    layers |= {hf: tensors[fuji] for fuji, hf in _NORMS.items()}
    layers |= {hf: np.swapaxes(tensors[fuji], 1, 2) for fuji, hf in _FEED_FORWARD.items()}
    return layers


def _orders(spec: Spec) -> tuple[NDArray[Any], NDArray[Any]]:
    """Fuji's channels out of Hugging Face's, and back."""
    order = np.arange(spec.head_dim).reshape(2, -1).T.reshape(-1)
    return order, np.argsort(order)


def _stacked(spec: Spec, tensors: Mapping[str, NDArray[Any]], name: str) -> NDArray[Any]:
    return np.stack([tensors[layer_name(number, name)] for number in range(spec.num_layers)])


def _heads(spec: Spec, weight: NDArray[Any]) -> NDArray[Any]:
    """(L, H C, D) -> (L, D, H, C)."""
    split = weight.reshape(spec.num_layers, -1, spec.head_dim, spec.hidden_size)
    return np.moveaxis(split, 3, 1)
