"""Decoder layers through torch.compile, where they give the same numbers and compile once.

Shape letters: B rows, T tokens, D hidden.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pippin.data.batches import Batch, Sample, lay_out
from pippin.engines.torch.body import body, hidden_states
from pippin.engines.torch.rows import Rows
from pippin.recipe import Train

LIMIT = 64  # versions of the layers' code that torch keeps; one process may hold many trainers


def compile_layers(
    network: PreTrainedModel, layout: Callable[[Batch, torch.device], Rows], train: Train
) -> str | None:
    """Compile every decoder layer for micro-batches of the recipe's shape.

    Each layer is run eagerly and compiled on the same inputs. Where outputs or gradients differ,
    where code would be compiled anew for every batch, or where the compiler fails, the layers are
    left as they were and the reason is returned.
    """
    layers = decoder_layers(network)
    first, second = (layout(_drawn(network, train, seed), network.device) for seed in (1, 2))
    fault = _unfit(network, layers, first)
    if fault:
        return fault
    with torch._dynamo.config.patch(recompile_limit=LIMIT), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice on float32 products, which stay exact here
        fault = _try(network, layers, (first, second), _tolerance(network, train))
    if fault:
        for layer in layers:
            layer._compiled_call_impl = None
    return fault


def wake_autograd(device: torch.device) -> None:
    """Autograd's own thread meets the device: cuBLAS warns where it is the first there."""
    torch.zeros(1, device=device, requires_grad=True).exp().sum().backward()


def graphs() -> int:
    """How many graphs this process has compiled."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def decoder_layers(network: PreTrainedModel) -> list[nn.Module]:
    """The layers of the body; empty where they are in no list of their own."""
    count = network.config.get_text_config().num_hidden_layers
    lists = [m for m in body(network).modules() if isinstance(m, nn.ModuleList)]
    return next((list(found) for found in lists if len(found) == count), [])


def _unfit(network: PreTrainedModel, layers: list[nn.Module], rows: Rows) -> str | None:
    packing = rows.extra.get("packing")
    if not layers:
        return f"{type(network).__name__} has no list of decoder layers"
    if packing is None or packing.first_T is None:
        return "its attention is not one kernel for all samples"
    packing.seen = set()
    with torch.no_grad():
        hidden_states(network, rows.tokens_BT, **rows.extra)
    asked, packing.seen = packing.seen, None
    return "its attention runs sample by sample" if "samples" in asked else None


def _try(
    network: PreTrainedModel, layers: list[nn.Module], both: tuple[Rows, Rows], tolerance: float
) -> str | None:
    was_training = network.training
    network.train()
    for layer in layers:
        _without_dropout(layer)
    try:
        first, second = both
        fault = _differs(network, layers, first, tolerance)
        count = graphs()
        fault = fault or _differs(network, layers, second, tolerance)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return str(error).strip().partition("\n")[0][:200] or type(error).__name__
    finally:
        network.train(was_training)
    return fault or ("every batch compiles again" if graphs() > count else None)


def _without_dropout(layer: nn.Module) -> None:
    """Eager and compiled code draw other random numbers."""
    if any(getattr(m, "dropout", None) or getattr(m, "p", None) for m in layer.modules()):
        layer.eval()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """What the network passed to a layer."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _differs(
    network: PreTrainedModel, layers: list[nn.Module], rows: Rows, tolerance: float
) -> str | None:
    for layer in layers:
        layer._compiled_call_impl = None
    calls = _calls(network, layers, rows)
    for number, (layer, call) in enumerate(zip(layers, calls, strict=True)):
        eager = list(_results(layer, call, number > 0))
        layer.compile(dynamic=False)
        ours = list(_results(layer, call, number > 0))
        for name, wanted, got in zip(_names(layer, number > 0), eager, ours, strict=True):
            far = _distance(got, wanted)
            if not far <= tolerance:
                return f"{name} of layer {number} differs by {far:.2g} from the uncompiled one's"
    return None


def _tolerance(network: PreTrainedModel, train: Train) -> float:
    """bfloat16 rounds every product it keeps; in FP8 that moves many codes to a neighbour."""
    if train.frozen_dtype == "float8":
        return 0.1
    return 1e-3 if network.dtype == torch.float32 else 3e-2


@torch.no_grad()
def _calls(network: PreTrainedModel, layers: list[nn.Module], rows: Rows) -> list[_Call]:
    calls: list[_Call] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(_Call(args=args, kwargs=kwargs))

    handles = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers]
    try:
        hidden_states(network, rows.tokens_BT, **rows.extra)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _results(layer: nn.Module, call: _Call, inner: bool) -> Iterator[Tensor]:
    """Output and gradients of a layer; only an `inner` one has a gradient of its input."""
    hidden = call.args[0].detach().requires_grad_(inner)
    out = layer(hidden, *call.args[1:], **call.kwargs)
    out = out[0] if isinstance(out, tuple) else out
    generator = torch.Generator(out.device).manual_seed(0)
    upstream = torch.randn(out.shape, generator=generator, device=out.device).to(out.dtype)
    yield out.detach()
    wanted = [hidden] * inner + [p for p in layer.parameters() if p.requires_grad]
    if wanted:
        grads = torch.autograd.grad(out, wanted, upstream, allow_unused=True)
        pairs = zip(wanted, grads, strict=True)
        yield from (torch.zeros_like(x) if g is None else g for x, g in pairs)


def _names(layer: nn.Module, inner: bool) -> list[str]:
    trained = [name for name, p in layer.named_parameters() if p.requires_grad]
    return ["the output", *["the gradient"] * inner, *(f"the gradient of {n}" for n in trained)]


def _distance(ours: Tensor, wanted: Tensor) -> float:
    """Relative, by norms: single elements near zero may differ."""
    difference, norm = (ours.float() - wanted.float()).norm(), wanted.float().norm()
    return float(difference / norm) if norm > 0 else float(difference)


def _drawn(network: PreTrainedModel, train: Train, seed: int) -> Batch:
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


def _sample(tokens: Any) -> Sample:
    return Sample(tokens=tokens, scored=np.arange(len(tokens)) > 0, row=0)
