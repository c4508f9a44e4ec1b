"""A decoder layer of Llama's shape, forward and backward by hand, for CPUs.

It keeps what a backward needs and cannot make again cheaply: norms and the gated product are made
again. Weights stay where they are, in a mapped file perhaps. Adapters that read the same inputs
share their thin products.

Shape letters: T tokens, D hidden, I inputs, O outputs, R rank, E ranks of a group together.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pippin.engines.torch import cpu_kernels as kernels
from pippin.engines.torch.attention import Packing
from pippin.engines.torch.lora import LoraLinear
from pippin.engines.torch.parts import Parts, take_apart


class Group:
    """Linears that read the same inputs: y = x W^T + bias + scale * x A^T B^T, each."""

    def __init__(self, linears: list[Any]) -> None:
        self.linears = linears
        self.adapters = [linear for linear in linears if isinstance(linear, LoraLinear)]
        self.scale = self.adapters[0].scale if self.adapters else 1.0

    @property
    def masters(self) -> list[nn.Parameter]:
        """lora_A and lora_B of every adapter in turn."""
        return [master for a in self.adapters for master in (a.lora_A, a.lora_B)]

    def forward(self, x_TI: Tensor) -> tuple[list[Tensor], Tensor]:
        """The outputs (T, O) in turn, and scale * x A^T (T, E)."""
        z_TE = x_TI @ self._a(x_TI.dtype).T * self.scale if self.adapters else x_TI[:, :0]
        ys = []
        for linear, ranks in self._with_ranks():
            y_TO = functional.linear(x_TI, linear.weight, linear.bias)
            if ranks is not None:
                y_TO.addmm_(z_TE[:, ranks], linear.lora_B.to(x_TI.dtype).T)
            ys.append(y_TO)
        return ys, z_TE

    def backward(
        self, dys: list[Tensor], x_TI: Tensor, z_TE: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """The gradient of x (T, I), and those of the masters."""
        dz_TE, grads = self.grads(dys, x_TI, z_TE)
        dx_TI = dys[0] @ self.linears[0].weight
        for dy_TO, linear in zip(dys[1:], self.linears[1:], strict=True):
            dx_TI.addmm_(dy_TO, linear.weight)
        if self.adapters:
            dx_TI.addmm_(dz_TE, self._a(dx_TI.dtype))
        return dx_TI, grads

    def grads(self, dys: list[Tensor], x_TI: Tensor, z_TE: Tensor) -> tuple[Tensor, list[Tensor]]:
        """scale * dy B (T, E), and the gradients of the masters."""
        dz_TE, b_grads = torch.empty_like(z_TE), []
        for dy_TO, (linear, ranks) in zip(dys, self._with_ranks(), strict=True):
            if ranks is not None:
                b_OR = linear.lora_B.to(dy_TO.dtype)
                dz_TE[:, ranks] = (dy_TO @ b_OR).mul_(self.scale)
                b_grads.append((z_TE[:, ranks].T @ dy_TO).T)
        if not self.adapters:
            return dz_TE, []
        a_grads = (dz_TE.T @ x_TI).split([len(a.lora_A) for a in self.adapters])
        pairs = zip(a_grads, b_grads, strict=True)
        return dz_TE, [grad for pair in pairs for grad in pair]

    def _with_ranks(self) -> Iterator[tuple[Any, slice | None]]:
        """Every linear, and where its adapter's ranks stand among the group's."""
        start = 0
        for linear in self.linears:
            if isinstance(linear, LoraLinear):
                stop = start + len(linear.lora_A)
                yield linear, slice(start, stop)
                start = stop
            else:
                yield linear, None

    def _a(self, dtype: torch.dtype) -> Tensor:
        """(E, I)."""
        return torch.cat([adapter.lora_A.to(dtype) for adapter in self.adapters])


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama:
    """One layer; `groups` are key, query, value; output; gate, up; down."""

    parts: Parts
    groups: tuple[Group, Group, Group, Group]

    @property
    def masters(self) -> list[nn.Parameter]:
        """Of all groups in turn."""
        return [master for group in self.groups for master in group.masters]


class Call(NamedTuple):
    """What the network tells every layer: the positions' angles, and where the samples lie."""

    angles: tuple[Tensor, Tensor]
    attention: kernels.Attention


def find_parts(layer: nn.Module) -> Llama | str:
    """The layer taken apart, or why it cannot be."""
    parts = take_apart(layer)
    if isinstance(parts, str):
        return parts
    if not kernels.known(parts.norms[0].weight_D.dtype):
        return kernels.missing() or "its numbers are of another kind"
    kqv, o, both, down = map(Group, parts.linears)
    return Llama(parts=parts, groups=(kqv, o, both, down))


def forward_of(layer: Llama) -> Callable[..., Tensor]:
    """A forward with the signature that transformers calls its layers by."""

    def forward(
        hidden_BTD: Tensor, *_: Any, position_embeddings: Any, packing: Packing, **__: Any
    ) -> Tensor:
        cos_TC, sin_TC = (angles[0].contiguous() for angles in position_embeddings)
        call = Call((cos_TC, sin_TC), _attention(layer.parts, packing))
        x_TD = hidden_BTD.flatten(0, 1).contiguous()
        return _Layer.apply(x_TD, layer, call, *layer.masters)[None]

    return forward


def _attention(parts: Parts, packing: Packing) -> kernels.Attention:
    edges = torch.tensor([0, *(stop for _, stop in packing.bounds)])
    return kernels.Attention(
        edges=edges,
        heads=parts.heads[0],
        kv_heads=parts.heads[1],
        channels=parts.channels,
        window=parts.window or int(edges[-1]),
        scale=parts.scale,
    )


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, layer: Llama, call: Call, *_: Tensor) -> Tensor:
        (kqv, o, both, down), (first, second) = layer.groups, layer.parts.norms
        (k, q, v), z_kqv = kqv.forward(kernels.norm(x_TD, *first))
        for x in (k, q):
            kernels.rotate(x, call.angles, layer.parts.channels, 1.0)
        mixed = call.attention.forward(q, k, v)
        (middle_TD,), z_o = o.forward(mixed)
        middle_TD += x_TD
        (gate, up), z_both = both.forward(kernels.norm(middle_TD, *second))
        (out_TD,), z_down = down.forward(kernels.gate(gate, up))
        out_TD += middle_TD
        narrow = (z_kqv, z_o, z_both, z_down)
        ctx.save_for_backward(x_TD, q, k, v, mixed, middle_TD, gate, up, *narrow)
        ctx.layer, ctx.call = layer, call
        return out_TD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """In the forward's order reversed."""
        layer, call = ctx.layer, ctx.call
        (kqv, o, both, down), (first, second) = layer.groups, layer.parts.norms
        x_TD, q, k, v, mixed, middle_TD, gate, up, *narrow = ctx.saved_tensors
        z_kqv, z_o, z_both, z_down = narrow
        grad_TD = grads[0].contiguous()
        d_gated, down_grads = down.backward([grad_TD], kernels.gate(gate, up), z_down)
        d_gate_up = list(kernels.gate_grad(d_gated, gate, up))
        read_TD = kernels.norm(middle_TD, *second)
        d_read, both_grads = both.backward(d_gate_up, read_TD, z_both)
        d_middle = kernels.norm_grad(d_read, middle_TD, grad_TD, *second)
        d_mixed, o_grads = o.backward([d_middle], mixed, z_o)
        d_q, d_k, d_v = call.attention.backward(d_mixed, q, k, v)
        for x in (d_k, d_q):
            kernels.rotate(x, call.angles, layer.parts.channels, -1.0)
        d_kqv, read_TD = [d_k, d_q, d_v], kernels.norm(x_TD, *first)
        if not ctx.needs_input_grad[0]:
            kqv_grads, dx_TD = kqv.grads(d_kqv, read_TD, z_kqv)[1], None
        else:
            d_read, kqv_grads = kqv.backward(d_kqv, read_TD, z_kqv)
            dx_TD = kernels.norm_grad(d_read, x_TD, d_middle, *first)
        return dx_TD, None, None, *kqv_grads, *o_grads, *both_grads, *down_grads
