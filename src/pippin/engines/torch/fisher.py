"""X^T X of every linear's inputs where a token counts by what its outputs do to the predictions.

A rounding error E moves a linear's outputs by E x. To second order that costs 1/2 (g^T E x)^2 nats
of divergence, g being the gradient of a prediction that the model itself draws (the Fisher
information). Spread evenly over the outputs that is 1/2 w |E x|^2 with w = |g|^2 / outputs. How it
is really spread is what the sums of g g^T say.

Shape letters: T tokens, N real tokens, D features, O outputs, S outputs of a span, C tokens of one
chunk, V vocabulary.
"""

import contextlib
from collections.abc import Collection, Generator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from pippin.engines.torch.body import hidden_states
from pippin.engines.torch.loss import Head, head_loss, logits_loss
from pippin.engines.torch.moments import LINEARS, add_upper, mirror
from pippin.engines.torch.rows import Rows
from pippin.quantizers.in_turn import outputs_of, spans

TINY = torch.finfo(torch.float32).tiny


class Weigher:
    """Sums w x x^T by linear, in the backward pass, and w g g^T over the mean square of g."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.real_N: Tensor | None = None

    def hook(self, name: str) -> Any:
        def after(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            x = inputs[0].detach()
            output.register_hook(lambda gradient: self.read(name, x, gradient))

        return after

    def read(self, name: str, x: Tensor, gradient: Tensor) -> None:
        x_ND, g_NO = (self.real(part).float() for part in (x, gradient))
        weight_N = g_NO.square().mean(-1)
        tamed_N = self.add(name, x_ND, weight_N)
        g_NO *= (tamed_N / weight_N.clamp(min=TINY)).sqrt()[:, None]
        self.add_outputs(name, g_NO)

    def real(self, values: Tensor) -> Tensor:
        return values.reshape(-1, values.shape[-1])[self.real_N]

    def add(self, name: str, x_ND: Tensor, weight_N: Tensor) -> Tensor:
        """One drawn prediction says little about a token: weights go halfway to their mean.

        Halfway in the logarithm, which tames the few that are a hundred times the others. Returns
        the weights that were used.
        """
        if name not in self.sums:
            width = x_ND.shape[1]
            self.sums[name] = torch.zeros((width, width), dtype=x_ND.dtype, device=x_ND.device)
        root_N = weight_N.sqrt()
        root_N = root_N * (weight_N.mean() / root_N.mean().clamp(min=TINY))
        add_upper(self.sums[name], x_ND * root_N.sqrt()[:, None])
        return root_N

    def add_outputs(self, name: str, g_NO: Tensor) -> None:
        """Sums of g g^T, span by span."""
        parts = spans(g_NO.shape[1])
        if name not in self.outputs:
            self.outputs[name] = g_NO.new_zeros((g_NO.shape[1], parts[0].stop))
        for span in parts:
            add_upper(self.outputs[name][span, : span.stop - span.start], g_NO[:, span])

    def moments(self) -> dict[str, NDArray[np.float32]]:
        """The sums by linear, on the host, `outputs_of` a linear too; the weigher's are spent."""
        for total_DD in self.sums.values():
            mirror(total_DD)
        for name, total_OS in self.outputs.items():
            for span in spans(len(total_OS)):
                mirror(total_OS[span, : span.stop - span.start])
            self.sums[outputs_of(name)] = total_OS
        found = {name: total.cpu().numpy() for name, total in self.sums.items()}
        self.sums, self.outputs = {}, {}  # or the caller holds them while the next layer is read
        return found


def loss_moments(
    network: PreTrainedModel,
    head: Head | None,
    batches: Sequence[Rows],
    names: Collection[str] | None,
    seed: int,
) -> dict[str, NDArray[np.float32]]:
    """By linear's name, (D, D) float32: of `names`, or of all; its `outputs_of` as well.

    `seed` draws the predictions. The head's own moments need `head`, its formula.
    """
    collector, draw = Weigher(), torch.Generator(network.device).manual_seed(seed)
    own = network.get_output_embeddings()
    asked = {n: m for n, m in network.named_modules() if names is None or n in names}
    linears = {n: m for n, m in asked.items() if isinstance(m, LINEARS)}
    head_name = next((n for n, m in linears.items() if m is own and head is not None), None)
    body: dict[str, nn.Module] = {n: m for n, m in linears.items() if m is not own}
    with _watched(network, body, collector):
        for rows in batches:
            collector.real_N = rows.real_N
            if head is None:
                out = network(input_ids=rows.tokens_BT, use_cache=False, **rows.extra)
                logits_NV = collector.real(out.logits)
                logits_loss(logits_NV, _draw(logits_NV.detach(), draw)[0]).backward()
                continue
            hidden_ND = collector.real(hidden_states(network, rows.tokens_BT, **rows.extra))
            targets_N, weight_N = drawn_predictions(hidden_ND.detach(), head, draw)
            head_loss(hidden_ND, targets_N, head).backward()
            if head_name is not None:
                collector.add(head_name, hidden_ND.detach().float(), weight_N)
    return collector.moments()


@contextlib.contextmanager
def _watched(
    network: PreTrainedModel, linears: dict[str, nn.Module], collector: Weigher
) -> Generator[None]:
    """Weights are frozen: what the embedding gives is the first that gradients reach."""
    embedding: Any = network.get_input_embeddings()
    handles = [m.register_forward_hook(collector.hook(n)) for n, m in linears.items()]
    handles.append(embedding.register_forward_hook(lambda m, x, out: out.requires_grad_(True)))
    try:
        with torch.enable_grad():
            yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def drawn_predictions(
    hidden_ND: Tensor, head: Head, draw: torch.Generator
) -> tuple[Tensor, Tensor]:
    """A next token drawn for every hidden state, and the weight of the logits there."""
    parts = [_draw(head.logits(chunk_CD), draw) for chunk_CD in hidden_ND.split(head.chunk)]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def _draw(logits_CV: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """The gradient by a logit is its probability, less one for the token that was drawn."""
    p_CV = logits_CV.float().softmax(-1)
    # Logits that are not finite make moments that are not; the caller looks.
    token_C1 = torch.multinomial(p_CV.nan_to_num(1.0), 1, generator=draw)
    square_C = p_CV.square().sum(-1) - 2 * p_CV.gather(1, token_C1)[:, 0] + 1
    return token_C1[:, 0], square_C / p_CV.shape[1]
