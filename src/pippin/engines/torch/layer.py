"""A decoder layer of Llama's shape, forward and backward by hand, for CUDA.

It keeps what a backward needs and nothing else, joins products that read the same inputs, and lets
the adapters ride along in them. Layers of another shape, or that compute something else, are left.

Shape letters: T tokens, S tokens that are read, D hidden, F feed-forward, H query heads, K kv
heads, C head channels, O all their channels.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pippin.engines.torch import layer_ops as ops
from pippin.engines.torch.attention import Packing
from pippin.engines.torch.float8 import SIDE
from pippin.engines.torch.frames import Frame, Wide, over_tokens
from pippin.engines.torch.parts import Norm, take_apart
from pippin.engines.torch.triton_ops import attend_backward, attend_forward

WIDEST = 8192  # a norm's row fits a program's registers


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama:
    """The parts of one layer. `window` is None for plain causal attention.

    `refresh` takes the adapters' newest values. The `last` layer goes on with what is read.
    """

    norms: tuple[Norm, Norm]
    kqv: Frame
    o: Frame
    both: Frame
    down: Frame
    heads: tuple[int, int, int]
    scale: float
    window: int | None
    last: bool
    refresh: Callable[[], None]

    @property
    def frames(self) -> tuple[Frame, ...]:
        """In the order of their products."""
        return self.kqv, self.o, self.both, self.down

    @property
    def tiled(self) -> bool:
        """Whether the adapters on both sides of the gate take their gradients while it is there.

        FP8 needs a token's whole row at once.
        """
        return bool(self.both.adapters and self.down.adapters) and not self.both.float8

    @property
    def masters(self) -> list[nn.Parameter]:
        """Of all frames in turn."""
        return [master for frame in self.frames for master in frame.masters]

    def split(self, kqv_TO: Tensor) -> list[Tensor]:
        """Query, key and value as (1, H, T, C), views of the rows."""
        heads, kv, channels = self.heads
        by_head = kqv_TO.unflatten(1, (-1, channels))
        k, q, v = (x.transpose(0, 1)[None] for x in by_head.split([kv, heads, kv], 1))
        return [q, k, v]

    def by_head(self, x_TD: Tensor) -> Tensor:
        """(1, T, H, C), a view of the rows."""
        return x_TD.unflatten(1, (self.heads[0], self.heads[2]))[None]

    @property
    def turned(self) -> int:
        """Heads of key and query, which come first in a row and are turned by their position."""
        return self.heads[0] + self.heads[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """What the network tells every layer: the positions' angles and where the samples lie.

    Behind attention a layer goes on with the tokens `read_S`, with all where that is None.
    """

    cos_TC: Tensor
    sin_TC: Tensor
    packing: Packing
    read_S: Tensor | None

    def read(self, a: Wide, x_TD: Tensor, frame: Frame) -> tuple[Wide, Tensor]:
        """Those of what `frame` reads, and of the layer's input."""
        if self.read_S is None:
            return a, x_TD
        some = frame.inner(len(self.read_S), keep=True)
        some.values.copy_(a.values[self.read_S])
        return some, x_TD[self.read_S]

    def spread(self, x_SD: Tensor, tokens: int) -> Tensor:
        """(T, D), zeros between; or what it was."""
        if self.read_S is None:
            return x_SD
        return x_SD.new_zeros(tokens, x_SD.shape[1]).index_copy_(0, self.read_S, x_SD)


def find_parts(layer: nn.Module, float8: bool, last: bool) -> Llama | str:
    """The layer taken apart, or why it cannot be."""
    parts = take_apart(layer)
    if isinstance(parts, str):
        return parts
    linears = [linear for group in parts.linears for linear in group]
    if float8 and any(linear.weight.dtype != torch.bfloat16 or _odd(linear) for linear in linears):
        return "its matrices do not fit FP8 products"
    if any(norm.weight_D.shape[0] > WIDEST for norm in parts.norms):
        return f"it is wider than {WIDEST}"
    first, *others = parts.linears
    # Its products are 4 % faster by columns, the others' are not.
    kqv = ops.CudaFrame(first, float8, by_columns=True)
    o, both, down = (ops.CudaFrame(group, float8) for group in others)
    return Llama(
        norms=parts.norms,
        kqv=kqv,
        o=o,
        both=both,
        down=down,
        heads=(*parts.heads, parts.channels),
        scale=parts.scale,
        window=parts.window,
        last=last,
        refresh=ops.refresher((kqv, o, both, down)),
    )


def _odd(linear: Any) -> bool:
    return linear.in_features % SIDE > 0 or linear.out_features % SIDE > 0


def forward_of(parts: Llama) -> Callable[..., Tensor]:
    """A forward with the signature that transformers calls its layers by."""

    def forward(
        hidden_BTD: Tensor, *_: Any, position_embeddings: Any, packing: Packing, **__: Any
    ) -> Tensor:
        cos_TC, sin_TC = (angles[0].contiguous() for angles in position_embeddings)
        read_S = packing.read_S if parts.last else None
        call = Call(cos_TC=cos_TC, sin_TC=sin_TC, packing=packing, read_S=read_S)
        out_SD = _Layer.apply(hidden_BTD.flatten(0, 1), parts, call, *parts.masters)
        return out_SD[None]

    return forward


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, parts: Llama, call: Call, *_: Tensor) -> Tensor:
        parts.refresh()
        x_TD = x_TD.contiguous()
        n = parts.kqv.inner(len(x_TD))
        rates_T = ops.norm(x_TD, parts.norms[0], n)[1]
        kqv_TO = parts.kqv.product(n)
        ops.rotate(kqv_TO, call.cos_TC, call.sin_TC, parts.turned, 1.0)
        a = parts.o.inner(len(x_TD), keep=True)
        lse_HT = attend_forward(
            *parts.split(kqv_TO), parts.by_head(a.values), *_limits(parts, call)
        )
        read, x_SD = call.read(a, x_TD, parts.o)
        y_SD = parts.o.product(ops.encode(read))
        m = parts.both.inner(len(x_SD))
        middle_SD, middle_rates_S = ops.norm(x_SD, parts.norms[1], m, y_SD)
        both_SF = parts.both.product(m)
        h = ops.gate(both_SF, parts.down)
        if parts.tiled:
            y_SD, h_kept = parts.down.wide_product(h)
            out_SD = ops.add_update(y_SD, h_kept, parts.down.beside.T, middle_SD)
        else:
            out_SD, h_kept = parts.down.product(h).add_(middle_SD), _kept(h, parts.down)
        again = (_kept(n, parts.kqv), read.whole, _kept(m, parts.both), h_kept)
        kept = (x_TD, rates_T, kqv_TO, a.values, lse_HT, middle_SD, middle_rates_S, both_SF)
        ctx.save_for_backward(*kept, *again)
        ctx.parts, ctx.call = parts, call
        return out_SD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """In the forward's order reversed."""
        parts, call = ctx.parts, ctx.call
        x_TD, rates_T, kqv_TO, a_TD, lse_HT, middle_SD, middle_rates_S, both_SF, *again = (
            ctx.saved_tensors
        )
        n_whole, read_whole, m_whole, h_kept = again
        grad_SD = grads[0]
        d_m, both_grads, down_grads = _mlp_back(parts, grad_SD, both_SF, m_whole, h_kept)
        d_y = parts.o.outer(len(middle_SD), keep=True)
        norms = parts.norms
        d_middle = ops.norm_grad(d_m, (middle_SD, middle_rates_S), norms[1], d_y, grad_SD)
        d_a, o_grads = parts.o.product_back(d_y, read_whole)
        d_a, d_middle = (call.spread(x, len(x_TD)) for x in (d_a, d_middle))
        d_kqv = parts.kqv.outer(len(x_TD), keep=True)
        kept = parts.by_head(a_TD), lse_HT
        d_split = parts.split(d_kqv.values)
        limits = _limits(parts, call)
        attend_backward(parts.by_head(d_a), kept, parts.split(kqv_TO), d_split, *limits)
        ops.rotate(d_kqv.values, call.cos_TC, call.sin_TC, parts.turned, -1.0)
        dx_TD = None
        if ctx.needs_input_grad[0]:
            d_n, kqv_grads = parts.kqv.product_back(ops.encode(d_kqv), n_whole)
            # Where the layer below reads it; FP8 codes would not travel with it.
            dx = replace(parts.down.outer(len(x_TD), keep=True), codes=None)
            dx_TD = ops.norm_grad(d_n, (x_TD, rates_T), norms[0], dx, d_middle)
        else:
            kqv_grads = parts.kqv.grads(d_kqv, n_whole)
        return dx_TD, None, None, *kqv_grads, *o_grads, *both_grads, *down_grads


def _mlp_back(
    parts: Llama, grad_SD: Tensor, both_SF: Tensor, m_whole: Any, h_kept: Any
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The gradient of what gate and up read, and those of the masters of `both` and `down`."""
    both, down = parts.both, parts.down
    dy = ops.take(grad_SD, down)
    if not parts.tiled:
        d_h, down_grads = down.product_back(dy, h_kept)
        d_m, both_grads = both.product_back(ops.gate_grad(d_h, both_SF, both), m_whole)
        return d_m, both_grads, down_grads
    down.fill_back(dy)
    m_SI, m_SE = m_whole[:, : both.inputs], m_whole[:, both.inputs :]
    d_h = down.back_through(dy)
    d_both, above_FE, below_EF = ops.gate_grad_tiles(d_h, both_SF, both, m_SE, dy.tail)
    d_m = both.wide_back(d_both)
    both_grads = both.split(over_tokens(d_both.tail, m_SI), above_FE[both.span])
    return d_m, both_grads, down.split(below_EF, down.beside_grad(dy, h_kept))


def _kept(x: Wide, frame: Frame) -> Tensor | None:
    """Only adapters read their inputs again."""
    return x.whole if frame.adapters else None


def _limits(parts: Llama, call: Call) -> tuple[Any, ...]:
    packing = call.packing
    assert packing.first_T is not None
    window = len(packing.first_T) if parts.window is None else parts.window
    return packing.first_T, packing.last_T, parts.scale, window
