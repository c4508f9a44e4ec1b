"""Kernels for what lies between a layer's products on a CPU, compiled once by the machine's g++.

Shape letters: T tokens, D hidden, F feed-forward, H heads, K kv heads, C head channels, R turned
channels, S scored positions, V vocabulary.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pippin.compiled import Compiled

TAILS = {torch.float32: "_f", torch.bfloat16: "_h"}
SIGNATURES = {
    "norm": "pppiif",
    "norm_grad": "pppppiif",
    "gate": "pppl",
    "gate_grad": "ppppppl",
    "rotate": "pppiiiif",
    "attend": "ppppp",
    "attend_grad": "pppppppp",
    "loss": "pppiifb",
}
HERE = Path(__file__)
COMPILED = Compiled(
    source=HERE.with_suffix(".cpp"),
    headers=(HERE.with_name("cpu_numbers.h"), HERE.with_name("cpu_attention.h")),
    flags="-fopenmp",
    signatures={name + tail: SIGNATURES[name] for name in SIGNATURES for tail in TAILS.values()},
)


def missing() -> str | None:
    """Why there are no kernels here, in words; None where there are. Compiles them if need be."""
    return COMPILED.missing


def known(dtype: torch.dtype) -> bool:
    """Whether there are kernels, and for this dtype."""
    return dtype in TAILS and missing() is None


def norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """The RMS norm, rounded before it is scaled; (T, D)."""
    out_TD = torch.empty_like(x_TD)
    _run("norm", x_TD, weight_D, out_TD, *x_TD.shape, eps)
    return out_TD


def norm_grad(
    grad_TD: Tensor, x_TD: Tensor, beside_TD: Tensor, weight_D: Tensor, eps: float
) -> Tensor:
    """The gradient of the norm's input, and `beside_TD` added to it."""
    out_TD = torch.empty_like(x_TD)
    _run("norm_grad", grad_TD, x_TD, weight_D, beside_TD, out_TD, *x_TD.shape, eps)
    return out_TD


def gate(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """silu(gate) * up."""
    out_TF = torch.empty_like(gate_TF)
    _run("gate", gate_TF, up_TF, out_TF, out_TF.numel())
    return out_TF


def gate_grad(grad_TF: Tensor, gate_TF: Tensor, up_TF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of gate and up, and silu(gate) * up; that of up takes `grad_TF`'s place."""
    d_gate_TF, gated_TF = torch.empty_like(gate_TF), torch.empty_like(gate_TF)
    _run("gate_grad", grad_TF, gate_TF, up_TF, d_gate_TF, grad_TF, gated_TF, grad_TF.numel())
    return d_gate_TF, grad_TF, gated_TF


def rotate(x_TO: Tensor, angles: tuple[Tensor, Tensor], channels: int, sign: float) -> None:
    """Turn every head of (T, H x C) by its position's cosines and sines (T, R), in place."""
    cos_TR, sin_TR = angles
    sizes = (len(x_TO), x_TO.shape[1] // channels, channels, cos_TR.shape[1])
    _run("rotate", x_TO, cos_TR, sin_TR, *sizes, sign)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """Causal attention inside samples: `edges` are where they begin, and the end, int64.

    `firsts` are the numbers of the samples that the others, behind them, go on from, and how many
    samples there are in all, int64.
    """

    edges: Tensor
    firsts: Tensor
    heads: int
    kv_heads: int
    channels: int
    window: int
    scale: float

    def forward(self, q_TO: Tensor, k_TO: Tensor, v_TO: Tensor, out_TO: Tensor) -> None:
        """(T, H x C) of queries, (T, K x C) of keys and of values -> (T, H x C)."""
        _run("attend", self._call(), q_TO, k_TO, v_TO, out_TO)

    def backward(self, grad_TO: Tensor, *qkv: Tensor) -> list[Tensor]:
        """The gradients of queries, keys and values."""
        grads = [torch.empty_like(x) for x in qkv]
        _run("attend_grad", self._call(), grad_TO, *qkv, *grads)
        return grads

    def _call(self) -> Any:
        sizes = (len(self.firsts) - 1, self.heads, self.kv_heads, self.channels, self.window)
        call = _Call(self.edges.data_ptr(), self.firsts.data_ptr(), *sizes, self.scale)
        return ctypes.pointer(call)


class _Call(ctypes.Structure):
    _fields_ = (
        ("edges", ctypes.c_void_p),
        ("firsts", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("families", "heads", "kv", "channels", "window")),
        ("scale", ctypes.c_float),
    )


def row_losses(products_SV: Tensor, targets_S: Tensor, scale: float, *, wanted: bool) -> Tensor:
    """Cross-entropy of logits = scale * products, (S,) float32.

    Where `wanted`, the products are overwritten with their gradients.
    """
    losses_S = products_SV.new_empty(len(products_SV), dtype=torch.float32)
    _run("loss", products_SV, targets_S, losses_S, *products_SV.shape, scale, wanted)
    return losses_S


def _run(name: str, *arguments: Any) -> None:
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    assert all(x.is_contiguous() for x in tensors), name
    function = getattr(COMPILED.library, name + TAILS[tensors[0].dtype])
    function(*(x.data_ptr() if isinstance(x, Tensor) else x for x in arguments))
