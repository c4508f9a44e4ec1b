"""What a decoder layer is given and what it returns: to compare two ways of computing it.

Shape letters: B rows, T tokens, D hidden.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pippin.data.batches import Batch, Sample, lay_out
from pippin.engines.torch.body import body, hidden_states
from pippin.engines.torch.rows import Rows
from pippin.recipe import Train


def decoder_layers(network: PreTrainedModel) -> list[nn.Module]:
    """The layers of the body; empty where they are in no list of their own."""
    count = network.config.get_text_config().num_hidden_layers
    lists = [m for m in body(network).modules() if isinstance(m, nn.ModuleList)]
    return next((list(found) for found in lists if len(found) == count), [])


def outside(network: PreTrainedModel) -> list[nn.Module]:
    """The modules that are in no decoder layer."""
    inside = {id(module) for layer in decoder_layers(network) for module in layer.modules()}
    return [module for module in network.modules() if id(module) not in inside]


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """What the network passed to a layer."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@torch.no_grad()
def layer_calls(network: PreTrainedModel, layers: list[nn.Module], rows: Rows) -> list[Call]:
    """What every layer is called with in a pass over `rows`."""
    calls: list[Call] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(Call(args=args, kwargs=kwargs))

    handles = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers]
    try:
        hidden_states(network, rows.tokens_BT, **rows.extra)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def results(
    layer: nn.Module, call: Call, inner: bool, read_S: Tensor | None = None
) -> dict[str, Tensor]:
    """Output and gradients of a layer, by what they are; `inner` asks for its input's too.

    `read_S` are the tokens that count, where not all do; the layer may leave the others out.
    """
    hidden = call.args[0].detach().requires_grad_(inner)
    out = layer(hidden, *call.args[1:], **call.kwargs)
    out = out[0] if isinstance(out, tuple) else out
    if read_S is not None and out.shape[1] != len(read_S):
        out = out[:, read_S]
    generator = torch.Generator(out.device).manual_seed(0)
    upstream = torch.randn(out.shape, generator=generator, device=out.device).to(out.dtype)
    leaves = {f"the gradient of {n}": p for n, p in layer.named_parameters() if p.requires_grad}
    if inner:
        leaves["the gradient"] = hidden
    grads: tuple[Tensor | None, ...] = ()
    if leaves:
        grads = torch.autograd.grad(out, list(leaves.values()), upstream, allow_unused=True)
    pairs = zip(leaves.items(), grads, strict=True)
    found = {name: torch.zeros_like(x) if g is None else g for (name, x), g in pairs}
    return {"the output": out.detach(), **found}


class Difference(str):
    """What differs, in words: a fault of the code or the machine, not a trait of the model."""


def difference(
    wanted: dict[str, Tensor], got: dict[str, Tensor], tolerance: float, where: str
) -> Difference | None:
    """The first result that is off by more than rounding."""
    for name, one in wanted.items():
        far = _distance(got[name], one)
        if not far <= tolerance:
            return Difference(f"{name} of {where} differs by {far:.2g} from the plain code's")
    return None


def _distance(ours: Tensor, wanted: Tensor) -> float:
    """Relative, by norms: single elements near zero may differ."""
    difference, norm = (ours.float() - wanted.float()).norm(), wanted.float().norm()
    return float(difference / norm) if norm > 0 else float(difference)


def drawn_batch(network: PreTrainedModel, train: Train, seed: int) -> Batch:
    """Random samples that fill most of a micro-batch of the recipe's shape."""
    rng = np.random.default_rng(seed)
    embedding: Any = network.get_input_embeddings()
    vocab, width = int(embedding.weight.shape[0]), train.row_tokens
    rows = []
    for _ in range(train.batch_rows):
        edges = np.unique(rng.integers(1, width, 5)) if train.packing else np.array([width])
        lengths = np.diff(edges, prepend=0)
        rows.append([_sample(rng.integers(0, vocab, n).astype(np.int32)) for n in lengths])
    return lay_out(rows, width)


def going_on(batch: Batch) -> Batch:
    """The same, where a row's second and third sample go on from its first."""
    first_B1 = (batch.segments_BT == 1).sum(1, keepdims=True)
    before_BT = np.where(np.isin(batch.segments_BT, (2, 3)), first_B1, 0).astype(np.int32)
    return replace(batch, positions_BT=batch.positions_BT + before_BT)


def _sample(tokens: Any) -> Sample:
    return Sample(tokens=tokens, scored=np.arange(len(tokens)) > 0, row=0)
