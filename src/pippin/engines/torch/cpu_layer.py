"""A decoder layer of Llama's shape, forward and backward by hand, for CPUs.

It keeps what a backward needs and cannot make again cheaply: norms and the gated product are made
again. Weights stay where they are, in a mapped file perhaps. Adapters that read the same inputs
share their thin products.

Shape letters: T tokens, D hidden, I inputs, O outputs, R rank, E ranks of a group together.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pippin.engines.torch import cpu_kernels as kernels
from pippin.engines.torch.attention import Packing
from pippin.engines.torch.cpu_products import add_products, rows_of
from pippin.engines.torch.lora import LoraLinear
from pippin.engines.torch.parts import Parts, take_apart


class Narrow(NamedTuple):
    """An adapter's pair in the dtype of products, and where its ranks stand in its group's."""

    a_RI: Tensor
    b_OR: Tensor
    ranks: slice


class Group:
    """Linears that read the same inputs: y = x W^T + bias + scale * x A^T B^T, each."""

    def __init__(self, linears: list[Any]) -> None:
        self.linears = linears
        self.adapters = [linear for linear in linears if isinstance(linear, LoraLinear)]
        self.scale = self.adapters[0].scale if self.adapters else 1.0
        self.ranks = [adapter.lora_A.shape[0] for adapter in self.adapters]
        self.dtype = linears[0].weight.dtype
        self.places = [master.detach().to(self.dtype) for master in self.masters]
        pairs = map(Narrow, self.places[::2], self.places[1::2], _spans(self.ranks))
        self.pairs = [next(pairs) if linear in self.adapters else None for linear in linears]

    @property
    def masters(self) -> list[nn.Parameter]:
        """lora_A and lora_B of every adapter in turn."""
        return [master for a in self.adapters for master in (a.lora_A, a.lora_B)]

    def forward(
        self, x_TI: Tensor, ys: Sequence[Tensor], beside_TO: Tensor | None = None
    ) -> Tensor:
        """Fill the outputs (T, O) in turn, `beside_TO` added; returns scale * x A^T (T, E)."""
        z_TE = x_TI.new_empty(x_TI.shape[0], sum(self.ranks))
        for y_TO, linear, pair in zip(ys, self.linears, self.pairs, strict=True):
            terms = [(x_TI, linear.weight.T)]
            if pair is not None:
                z_TR = z_TE[:, pair.ranks]
                add_products(z_TR, [(x_TI, pair.a_RI.T)], scale=self.scale)
                terms.append((z_TR, pair.b_OR.T))
            add_products(y_TO, terms, linear.bias if beside_TO is None else beside_TO)
            if beside_TO is not None and linear.bias is not None:
                y_TO.add_(linear.bias)
        return z_TE

    def narrow(self, dys: list[Tensor]) -> Tensor:
        """scale * dy B, (T, E)."""
        dz_TE = dys[0].new_empty(dys[0].shape[0], sum(self.ranks))
        for dy_TO, pair in zip(dys, self.pairs, strict=True):
            if pair is not None:
                add_products(dz_TE[:, pair.ranks], [(dy_TO, pair.b_OR)], scale=self.scale)
        return dz_TE

    def backward(self, dys: list[Tensor], dz_TE: Tensor) -> Tensor:
        """The gradient of x, (T, I)."""
        dx_TI = dz_TE.new_empty(dz_TE.shape[0], self.linears[0].in_features)
        terms = [(dy, linear.weight) for dy, linear in zip(dys, self.linears, strict=True)]
        terms += [(dz_TE[:, pair.ranks], pair.a_RI) for pair in self.pairs if pair is not None]
        add_products(dx_TI, terms)
        return dx_TI

    def grads(self, dys: list[Tensor], dz_TE: Tensor, x_TI: Tensor, z_TE: Tensor) -> list[Tensor]:
        """Of the masters, in their dtype."""
        if not self.adapters:
            return []
        z_ET, b_grads, exact = z_TE.T.contiguous(), [], self.adapters[0].lora_A.dtype
        for dy_TO, pair in zip(dys, self.pairs, strict=True):
            if pair is not None:
                b_grads.append(torch.empty_like(pair.b_OR, dtype=exact))
                add_products(b_grads[-1].T, [(z_ET[pair.ranks], dy_TO)])
        a_grad_EI = x_TI.new_empty(z_ET.shape[0], x_TI.shape[1], dtype=exact)
        add_products(a_grad_EI, [(dz_TE.T.contiguous(), x_TI)])
        both = zip(a_grad_EI.split(self.ranks), b_grads, strict=True)
        return [grad for pair in both for grad in pair]


def _spans(sizes: list[int]) -> list[slice]:
    """Where parts of these sizes stand, one after another."""
    edges = [0, *itertools.accumulate(sizes)]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


class Room:
    """Memory for what a network's layers keep, taken up again in every step: a heap would fray."""

    def __init__(self) -> None:
        self.layers, self._whole, self._taken = 0, torch.empty(0), set[int]()

    def take(self, number: int, widths: Sequence[int], like_TD: Tensor) -> list[Tensor]:
        """Uninitialised (T, width) each, of their own where the layer's place is taken."""
        tokens = like_TD.shape[0]
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

    `room` is None where nothing is kept for long. The `last` layer goes on with what is read.
    """

    parts: Parts
    groups: tuple[Group, Group, Group, Group]
    number: int
    last: bool
    room: Room | None

    @property
    def masters(self) -> list[nn.Parameter]:
        """Of all groups in turn."""
        return [master for group in self.groups for master in group.masters]

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the adapters' newest values."""
        if self.masters and self.masters[0].dtype != self.groups[0].dtype:
            places = [place for group in self.groups for place in group.places]
            torch._foreach_copy_(places, list[Tensor](self.masters))

    def take(self, x_TD: Tensor, keep: bool) -> list[Tensor]:
        """Key, query, value, what attention mixes, the middle, gate and up, to be filled."""
        kqv, o, both, _ = ([linear.out_features for linear in g.linears] for g in self.groups)
        widths = [*kqv, kqv[1], *o, *both]
        if self.room is not None and keep:
            return self.room.take(self.number, widths, x_TD)
        return [x_TD.new_empty(x_TD.shape[0], width) for width in widths]

    def leave(self, taken: Tensor) -> None:
        """What was taken, this among it, is not read any more."""
        if self.room is not None:
            self.room.leave(self.number, taken)


class Call(NamedTuple):
    """What the network tells every layer: the positions' angles, and where the samples lie.

    Behind attention a layer goes on with the tokens `read_S`, with all where that is None.
    """

    angles: tuple[Tensor, Tensor]
    attention: kernels.Attention
    keep: bool
    read_S: Tensor | None

    def read(self, x_TD: Tensor) -> Tensor:
        """(S, D), or what it was."""
        return x_TD if self.read_S is None else x_TD[self.read_S]

    def spread(self, x_SD: Tensor, tokens: int) -> Tensor:
        """(T, D), zeros between; or what it was."""
        if self.read_S is None:
            return x_SD
        return x_SD.new_zeros(tokens, x_SD.shape[1]).index_add_(0, self.read_S, x_SD)


def find_parts(layer: nn.Module, number: int, last: bool, room: Room | None) -> Llama | str:
    """The layer taken apart, or why it cannot be."""
    parts = take_apart(layer)
    if isinstance(parts, str):
        return parts
    if not kernels.known(parts.norms[0].weight_D.dtype):
        return kernels.missing() or "its numbers are of another kind"
    if room is not None:
        room.layers = max(room.layers, number + 1)
    kqv, o, both, down = map(Group, parts.linears)
    return Llama(parts=parts, groups=(kqv, o, both, down), number=number, last=last, room=room)


def forward_of(layer: Llama) -> Callable[..., Tensor]:
    """A forward with the signature that transformers calls its layers by.

    Rows are filled up to what products take well, as a sample of nobody's.
    """
    rows = rows_of(layer.parts.norms[0].weight_D.dtype)

    def forward(
        hidden_BTD: Tensor, *_: Any, position_embeddings: Any, packing: Packing, **__: Any
    ) -> Tensor:
        x_TD, cos_TC, sin_TC = (_filled(x, rows) for x in (hidden_BTD, *position_embeddings))
        attention = _attention(layer.parts, packing, x_TD.shape[0])
        wanted = packing.read_S if layer.last else None
        read_S = None if wanted is None else functional.pad(wanted, (0, -wanted.shape[0] % rows))
        call = Call((cos_TC, sin_TC), attention, torch.is_grad_enabled(), read_S)
        out_TD = _Layer.apply(x_TD, layer, call, *layer.masters)
        return out_TD[None, : hidden_BTD.shape[1] if wanted is None else wanted.shape[0]]

    return forward


def _filled(x: Tensor, rows: int) -> Tensor:
    """(1, T, ...) with zeros up to a multiple of `rows`, the first dimension left out."""
    missing = -x.shape[1] % rows
    return functional.pad(x[0], (0, 0, 0, missing)) if missing else x[0].contiguous()


def _attention(parts: Parts, packing: Packing, rows: int) -> kernels.Attention:
    starts, end = [span.start for span in packing.bounds], packing.bounds[-1].stop
    if rows > end:
        starts.append(end)
    rests = {number for number, span in enumerate(packing.bounds) if span.shared}
    firsts = [number for number in range(len(starts)) if number not in rests]
    return kernels.Attention(
        edges=torch.tensor([*starts, rows]),
        firsts=torch.tensor([*firsts, len(starts)]),
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
        layer.refresh()
        k, q, v, mixed, middle_TD, gate, up = layer.take(x_TD, call.keep)
        z_kqv = kqv.forward(kernels.norm(x_TD, *first), (k, q, v))
        for x in (k, q):
            kernels.rotate(x, call.angles, layer.parts.channels, 1.0)
        call.attention.forward(q, k, v, mixed)
        x_SD = call.read(x_TD)
        if call.read_S is not None:
            mixed[: x_SD.shape[0]] = call.read(mixed)
        mixed, middle_TD, gate, up = (x[: x_SD.shape[0]] for x in (mixed, middle_TD, gate, up))
        z_o = o.forward(mixed, (middle_TD,), x_SD)
        z_both = both.forward(kernels.norm(middle_TD, *second), (gate, up))
        out_TD = torch.empty_like(x_SD)
        z_down = down.forward(kernels.gate(gate, up), (out_TD,), middle_TD)
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
        dys, tokens = [grads[0].contiguous()], x_TD.shape[0]
        dz = down.narrow(dys)
        *d_both, gated = kernels.gate_grad(down.backward(dys, dz), gate, up)
        down_grads = down.grads(dys, dz, gated, z_down)
        dz, read_TD = both.narrow(d_both), kernels.norm(middle_TD, *second)
        both_grads = both.grads(d_both, dz, read_TD, z_both)
        d_middle = kernels.norm_grad(both.backward(d_both, dz), middle_TD, dys[0], *second)
        dz = o.narrow([d_middle])
        o_grads = o.grads([d_middle], dz, mixed, z_o)
        d_mixed = o.backward([d_middle], dz)
        d_mixed, d_middle = (call.spread(x, tokens) for x in (d_mixed, d_middle))
        d_q, d_k, d_v = call.attention.backward(d_mixed, q, k, v)
        for x in (d_k, d_q):
            kernels.rotate(x, call.angles, layer.parts.channels, -1.0)
        d_kqv, dx_TD = [d_k, d_q, d_v], None
        dz, read_TD = kqv.narrow(d_kqv), kernels.norm(x_TD, *first)
        kqv_grads = kqv.grads(d_kqv, dz, read_TD, z_kqv)
        if ctx.needs_input_grad[0]:
            dx_TD = kernels.norm_grad(kqv.backward(d_kqv, dz), x_TD, d_middle, *first)
        layer.leave(q)
        return dx_TD, None, None, *kqv_grads, *o_grads, *both_grads, *down_grads
