"""Cross-entropy of the head on scored positions only, in chunks: no tensor of tokens x vocabulary.

Shape letters: S scored positions, D hidden, V vocabulary, C positions of one chunk.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pippin.engines.torch import cpu_kernels
from pippin.engines.torch.attention import prepare
from pippin.engines.torch.cpu_products import add_products

CHUNK_BYTES = 1 << 26
KERNEL_BYTES = 96 << 20  # of products, where a kernel turns them into gradients in place
MOST_ROWS = 65535  # of a grid's second dimension on CUDA
BLOCK_BYTES = 1 << 20
MPS_INNER = 32768  # the longest inner length that every chip multiplies right (pytorch#177116)


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """logits = softcap * tanh(scale * (h W^T + bias) / softcap); softcap None leaves it out.

    `plain` asks for PyTorch's operators where the loss has kernels of ours.
    """

    weight_VD: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    plain: bool = False

    def logits(self, hidden_CD: Tensor) -> Tensor:
        """(C, V), in float32 or better."""
        return self.finish(self.products(hidden_CD))

    def products(self, hidden_CD: Tensor) -> Tensor:
        """h W^T + bias, (C, V) in the model's dtype."""
        if self.bias_V is None:
            return hidden_CD @ self.weight_VD.T
        return torch.addmm(self.bias_V, hidden_CD, self.weight_VD.T)

    def finish(self, products_CV: Tensor) -> Tensor:
        """From products to logits, a new tensor in float32 or better."""
        exact = torch.promote_types(products_CV.dtype, torch.float32)
        logits_CV = products_CV.to(exact, copy=True)
        if self.scale != 1.0:
            logits_CV = logits_CV.mul_(self.scale)
        if self.softcap is not None:
            logits_CV = logits_CV.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits_CV

    def slope(self, logits_CV: Tensor) -> Tensor | float | None:
        """d logits / d (h W^T), from the finished logits; None where it is 1."""
        if self.softcap is None:
            return None if self.scale == 1.0 else self.scale
        return (1 - (logits_CV / self.softcap).square_()).mul_(self.scale)

    @property
    def chunk(self) -> int:
        """Positions at a time: float32 logits of about 64 MiB."""
        return max(16, CHUNK_BYTES // (4 * self.weight_VD.shape[0]))


def head_loss(hidden_SD: Tensor, targets_S: Tensor, head: Head, *, consume: bool = False) -> Tensor:
    """Summed cross-entropy in nats, a scalar in float32 or better.

    Gradients go to the hidden states, and to the head's weight and bias where they are trained.
    `consume` lets the gradient take the hidden states' place in memory: nobody may read them again.
    """
    return _HeadLoss.apply(hidden_SD, head.weight_VD, head.bias_V, targets_S, head, consume)


class _HeadLoss(torch.autograd.Function):
    """The gradients are made in the forward, chunk by chunk, while the logits are there."""

    @staticmethod
    def forward(ctx: Any, hidden_SD: Tensor, weight_VD: Tensor, bias_V: Any, *rest: Any) -> Tensor:
        targets_S, head, consume = rest
        place_SD = hidden_SD if consume else torch.empty_like(hidden_SD)
        grads = _Grads.empty(place_SD, weight_VD, bias_V, ctx.needs_input_grad)
        exact = torch.promote_types(hidden_SD.dtype, torch.float32)
        losses, chunk = [hidden_SD.new_zeros(1, dtype=exact)], _chunk_rows(hidden_SD, head)
        for start in range(0, len(hidden_SD), chunk):
            part = slice(start, start + chunk)
            losses.append(_chunk(hidden_SD[part], targets_S[part], head, grads.part(part)))
        ctx.grads = grads
        return torch.cat(losses).sum()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        grads, ctx.grads = ctx.grads, None
        return (*grads.times(upstream[0]), None, None, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Grads:
    """Gradients of hidden states, weight and bias; None where nobody asks."""

    hidden_SD: Tensor | None
    weight_VD: Tensor | None
    bias_V: Tensor | None

    @classmethod
    def empty(cls, place_SD: Tensor, weight: Tensor, bias: Tensor | None, wants: Any) -> "_Grads":
        """The weight's gradient sums over chunks, so it sums in float32."""
        exact = torch.promote_types(weight.dtype, torch.float32)
        return cls(
            hidden_SD=place_SD if wants[0] else None,
            weight_VD=torch.zeros_like(weight, dtype=exact) if wants[1] else None,
            bias_V=torch.zeros_like(bias, dtype=exact) if bias is not None and wants[2] else None,
        )

    def part(self, part: slice) -> "_Grads":
        hidden_CD = None if self.hidden_SD is None else self.hidden_SD[part]
        return replace(self, hidden_SD=hidden_CD)

    def times(self, factor: Tensor) -> list[Tensor | None]:
        grads = (self.hidden_SD, self.weight_VD, self.bias_V)
        return [None if g is None else g.mul_(factor.to(g.dtype)) for g in grads]


def by_kernel(head: Head) -> bool:
    """Whether its losses are made by a kernel of ours."""
    return _in_place(head.weight_VD, head) or _on_cpu(head.weight_VD, head)


def _chunk_rows(hidden_SD: Tensor, head: Head) -> int:
    """Positions at a time: more on CUDA, where only the products are kept."""
    if not _in_place(hidden_SD, head):
        return head.chunk
    row = hidden_SD.element_size() * head.weight_VD.shape[0]
    return min(max(128, KERNEL_BYTES // row // 64 * 64), MOST_ROWS)


def _in_place(hidden_SD: Tensor, head: Head) -> bool:
    return not head.plain and hidden_SD.dtype != torch.float64 and prepare(hidden_SD.device)


def _on_cpu(products_CV: Tensor, head: Head) -> bool:
    simple = head.softcap is None and not head.plain
    return simple and products_CV.device.type == "cpu" and cpu_kernels.known(products_CV.dtype)


def _chunk(hidden_CD: Tensor, targets_C: Tensor, head: Head, grads: _Grads) -> Tensor:
    """The chunk's losses; fills its part of the hidden gradient, adds to the head's."""
    logits_CV = _products(hidden_CD, head)
    wanted = any(g is not None for g in (grads.hidden_SD, grads.weight_VD, grads.bias_V))
    losses = _losses(logits_CV, targets_C, head, wanted)
    if wanted:
        _fill(logits_CV, hidden_CD, head, grads)
    return losses


def _products(hidden_CD: Tensor, head: Head) -> Tensor:
    """h W^T + bias, (C, V); no gradient goes through it."""
    if hidden_CD.device.type != "cpu":
        return head.products(hidden_CD)
    products_CV = hidden_CD.new_empty(len(hidden_CD), len(head.weight_VD))
    add_products(products_CV, [(hidden_CD, head.weight_VD.T)], head.bias_V)
    return products_CV


def _losses(products_CV: Tensor, targets_C: Tensor, head: Head, wanted: bool) -> Tensor:
    """(L,) that sum to theirs; where `wanted`, the products become that sum's gradient."""
    if _in_place(products_CV, head):
        from pippin.engines.torch.triton_ops import row_losses

        return row_losses(products_CV, targets_C, head.scale, head.softcap, wanted=wanted)
    if _on_cpu(products_CV, head):
        return cpu_kernels.row_losses(products_CV, targets_C, head.scale, wanted=wanted)
    rows = max(1, BLOCK_BYTES // (4 * products_CV.shape[1]))
    losses = [
        _block(products_CV[start : start + rows], targets_C[start : start + rows], head, wanted)
        for start in range(0, len(products_CV), rows)
    ]
    return torch.stack(losses)


def _block(products_CV: Tensor, targets_C: Tensor, head: Head, wanted: bool) -> Tensor:
    """Summed loss of a few positions, small enough for the cache.

    Where `wanted`, the products are overwritten with the loss's gradient with respect to them.
    """
    logits_CV = head.finish(products_CV)
    index_C1 = targets_C[:, None]
    target_C1 = logits_CV.gather(1, index_C1)
    slope = head.slope(logits_CV) if wanted else None
    top_C1 = logits_CV.amax(1, keepdim=True)
    powers_CV = logits_CV.sub_(top_C1).exp_()
    sum_C1 = powers_CV.sum(1, keepdim=True)
    if wanted:
        d_CV = powers_CV.div_(sum_C1).scatter_add_(1, index_C1, torch.full_like(sum_C1, -1.0))
        products_CV.copy_(d_CV if slope is None else d_CV.mul_(slope))
    return (sum_C1.log() + top_C1 - target_C1).sum()


def _fill(d_CV: Tensor, hidden_CD: Tensor, head: Head, grads: _Grads) -> None:
    if grads.weight_VD is not None:
        grads.weight_VD.add_(d_CV.T @ hidden_CD)
    if grads.bias_V is not None:
        grads.bias_V.add_(d_CV.sum(0))
    if grads.hidden_SD is not None:  # last: it may lie where the hidden states do
        _product_over_words(d_CV, head.weight_VD, grads.hidden_SD)


def _product_over_words(d_CV: Tensor, weight_VD: Tensor, out_CD: Tensor) -> None:
    """d W into `out_CD`. On MPS in parts: M1 and M2 read beyond longer ones before PyTorch 2.14."""
    if d_CV.device.type == "cpu":
        add_products(out_CD, [(d_CV, weight_VD)])
        return
    parts = MPS_INNER if d_CV.device.type == "mps" else weight_VD.shape[0]
    torch.mm(d_CV[:, :parts], weight_VD[:parts], out=out_CD)
    for start in range(parts, weight_VD.shape[0], parts):
        part = slice(start, start + parts)
        out_CD.addmm_(d_CV[:, part], weight_VD[part])


def logits_loss(logits_SV: Tensor, targets_S: Tensor) -> Tensor:
    """Summed cross-entropy in nats of logits that are already there."""
    exact = torch.promote_types(logits_SV.dtype, torch.float32)
    return torch.nn.functional.cross_entropy(logits_SV.to(exact), targets_S, reduction="sum")
