"""A decoder layer of Llama's shape, forward and backward by hand, for CPUs.

It keeps what a backward needs and cannot make again cheaply: norms and the gated product are made
again. Weights stay where they are, in a mapped file perhaps. Adapters that read the same inputs
share their thin products.

Shape letters: T tokens, D hidden, I inputs, O outputs, R rank, E ranks of a group together.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pippin.engines.torch import cpu_kernels as kernels
from pippin.engines.torch.attention import Packing
from pippin.engines.torch.lora import LoraLinear
from pippin.engines.torch.parts import Parts, take_apart

ROWS = 16


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

    def forward(self, x_TI: Tensor, ys: Sequence[Tensor]) -> Tensor:
        """Fill the outputs (T, O) in turn; returns scale * x A^T (T, E)."""
        z_TE = x_TI @ self._a(x_TI.dtype).T * self.scale if self.adapters else x_TI[:, :0]
        for y_TO, (linear, ranks) in zip(ys, self._with_ranks(), strict=True):
            if linear.bias is None:
                torch.mm(x_TI, linear.weight.T, out=y_TO)
            else:
                torch.addmm(linear.bias, x_TI, linear.weight.T, out=y_TO)
            if ranks is not None:
                y_TO.addmm_(z_TE[:, ranks], linear.lora_B.to(x_TI.dtype).T)
        return z_TE

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


class Room:
    """Memory for what a network's layers keep, taken up again in every step: a heap would fray."""

    def __init__(self) -> None:
        self.layers, self._whole, self._taken = 0, torch.empty(0), set[int]()

    def take(self, number: int, widths: Sequence[int], like_TD: Tensor) -> list[Tensor]:
        """Uninitialised (T, width) each, of their own where the layer's place is taken."""
        tokens = len(like_TD)
        size = tokens * sum(widths)
        if number in self._taken:
            flat = like_TD.new_empty(size)
        else:
            if self._whole.numel() < self.layers * size or self._whole.dtype != like_TD.dtype:
                self._whole, self._taken = like_TD.new_empty(self.layers * size), set()
            self._taken.add(number)
            flat = self._whole.data[number * size : (number + 1) * size]
        return [x.view(tokens, -1) for x in flat.split([tokens * width for width in widths])]

    def leave(self, number: int, taken: Tensor) -> None:
        """Nobody reads what that layer took any more; memory of its own frees no place."""
        if taken.untyped_storage().data_ptr() == self._whole.untyped_storage().data_ptr():
            self._taken.discard(number)


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama:
    """One layer; `groups` are key, query, value; output; gate, up; down.

    `room` is None where nothing is kept for long.
    """

    parts: Parts
    groups: tuple[Group, Group, Group, Group]
    number: int
    room: Room | None

    @property
    def masters(self) -> list[nn.Parameter]:
        """Of all groups in turn."""
        return [master for group in self.groups for master in group.masters]

    def take(self, x_TD: Tensor, keep: bool) -> list[Tensor]:
        """Key, query, value, what attention mixes, the middle, gate and up, to be filled."""
        kqv, o, both, _ = ([linear.out_features for linear in g.linears] for g in self.groups)
        widths = [*kqv, kqv[1], *o, *both]
        if self.room is not None and keep:
            return self.room.take(self.number, widths, x_TD)
        return [x_TD.new_empty(len(x_TD), width) for width in widths]

    def leave(self, taken: Tensor) -> None:
        """What was taken, this among it, is not read any more."""
        if self.room is not None:
            self.room.leave(self.number, taken)


class Call(NamedTuple):
    """What the network tells every layer: the positions' angles, and where the samples lie."""

    angles: tuple[Tensor, Tensor]
    attention: kernels.Attention
    keep: bool


def find_parts(layer: nn.Module, number: int, room: Room | None) -> Llama | str:
    """The layer taken apart, or why it cannot be."""
    parts = take_apart(layer)
    if isinstance(parts, str):
        return parts
    if not kernels.known(parts.norms[0].weight_D.dtype):
        return kernels.missing() or "its numbers are of another kind"
    if room is not None:
        room.layers = max(room.layers, number + 1)
    kqv, o, both, down = map(Group, parts.linears)
    return Llama(parts=parts, groups=(kqv, o, both, down), number=number, room=room)


def forward_of(layer: Llama) -> Callable[..., Tensor]:
    """A forward with the signature that transformers calls its layers by.

    Rows are filled up to a multiple of ROWS, as a sample of nobody's: oneDNN keeps code for every
    number of rows that it has met, 9 MB in 30 layers that are never given back.
    """

    def forward(
        hidden_BTD: Tensor, *_: Any, position_embeddings: Any, packing: Packing, **__: Any
    ) -> Tensor:
        tokens = hidden_BTD.shape[1]
        x_TD, cos_TC, sin_TC = map(_filled, (hidden_BTD, *position_embeddings))
        attention = _attention(layer.parts, packing, len(x_TD))
        call = Call((cos_TC, sin_TC), attention, torch.is_grad_enabled())
        return _Layer.apply(x_TD, layer, call, *layer.masters)[None, :tokens]

    return forward


def _filled(x: Tensor) -> Tensor:
    """(1, T, ...) with rows of zeros up to a multiple of ROWS, the first dimension left out."""
    missing = -x.shape[1] % ROWS
    return functional.pad(x[0], (0, 0, 0, missing)) if missing else x[0].contiguous()


def _attention(parts: Parts, packing: Packing, rows: int) -> kernels.Attention:
    ends = [stop for _, stop in packing.bounds]
    more = [rows] if rows > ends[-1] else []
    return kernels.Attention(
        edges=torch.tensor([0, *ends, *more]),
        heads=parts.heads[0],
        kv_heads=parts.heads[1],
        channels=parts.channels,
        window=parts.window or rows,
        scale=parts.scale,
    )


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, layer: Llama, call: Call, *_: Tensor) -> Tensor:
        (kqv, o, both, down), (first, second) = layer.groups, layer.parts.norms
        k, q, v, mixed, middle_TD, gate, up = layer.take(x_TD, call.keep)
        z_kqv = kqv.forward(kernels.norm(x_TD, *first), (k, q, v))
        for x in (k, q):
            kernels.rotate(x, call.angles, layer.parts.channels, 1.0)
        call.attention.forward(q, k, v, mixed)
        z_o = o.forward(mixed, (middle_TD,))
        middle_TD += x_TD
        z_both = both.forward(kernels.norm(middle_TD, *second), (gate, up))
        out_TD = torch.empty_like(x_TD)
        z_down = down.forward(kernels.gate(gate, up), (out_TD,))
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
        layer.leave(q)
        return dx_TD, None, None, *kqv_grads, *o_grads, *both_grads, *down_grads
