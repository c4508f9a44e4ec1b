"""Decoder layers through torch.compile, where they give the same numbers and compile once.

Shape letters: B rows, T tokens, D hidden.
"""

import warnings
from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from pippin.data.batches import Batch
from pippin.engines.torch.body import hidden_states
from pippin.engines.torch.rows import Rows
from pippin.engines.torch.trial import (
    decoder_layers,
    difference,
    drawn_batch,
    layer_calls,
    results,
)
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
    first, second = (layout(drawn_batch(network, train, seed), network.device) for seed in (1, 2))
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


def _differs(
    network: PreTrainedModel, layers: list[nn.Module], rows: Rows, tolerance: float
) -> str | None:
    for layer in layers:
        layer._compiled_call_impl = None
    calls = layer_calls(network, layers, rows)
    for number, (layer, call) in enumerate(zip(layers, calls, strict=True)):
        eager = results(layer, call, number > 0)
        layer.compile(dynamic=False)
        again = results(layer, call, number > 0)
        fault = difference(eager, again, tolerance, f"layer {number}")
        if fault:
            return fault
    return None


def _tolerance(network: PreTrainedModel, train: Train) -> float:
    """bfloat16 rounds every product it keeps; in FP8 that moves many codes to a neighbour."""
    if train.frozen_dtype == "float8":
        return 0.1
    return 1e-3 if network.dtype == torch.float32 else 3e-2
