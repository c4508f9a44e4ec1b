"""Our own code in the place of a network's decoder layers, where it gives the same numbers."""

from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from pippin.data.batches import Batch
from pippin.engines.torch.attention import WIDEST
from pippin.engines.torch.rows import Rows
from pippin.engines.torch.trial import (
    Call,
    decoder_layers,
    difference,
    drawn_batch,
    layer_calls,
    results,
)
from pippin.errors import ModelError
from pippin.recipe import Train


def replace_layers(
    network: PreTrainedModel, layout: Callable[[Batch, torch.device], Rows], train: Train
) -> str | None:
    """Replace every layer's forward, its linears' products in FP8 where the recipe says so.

    Output and gradients are compared with the plain layer's on the same inputs. Where one differs,
    or has other parts, all layers are left as they were and the reason is returned. Raises
    ModelError where FP8 changes a layer by more than it may.
    """
    layers = decoder_layers(network)
    rows = layout(drawn_batch(network, train, 1), network.device)
    packing = rows.extra.get("packing")
    if not layers or packing is None or packing.first_T is None:
        return "its attention is not one kernel for all samples"
    calls = layer_calls(network, layers, rows)
    for number, (layer, call) in enumerate(zip(layers, calls, strict=True)):
        fault = _replace(layer, call, number, train.frozen_dtype == "float8")
        if fault:
            for done in layers[:number]:
                del done.forward
            return fault
    return None


def _replace(layer: nn.Module, call: Call, number: int, float8: bool) -> str | None:
    from pippin.engines.torch.layer import find_parts, forward_of

    parts = find_parts(layer, float8)
    if isinstance(parts, str):
        return parts
    if parts.heads[2] > WIDEST:
        return f"its heads are wider than {WIDEST}"
    wanted = results(layer, call, number > 0)
    layer.forward = forward_of(parts)
    fault = difference(wanted, results(layer, call, number > 0), _tolerance(wanted, float8), number)
    if fault and float8 and number > 0:
        raise ModelError(fault, 'set train.frozen_dtype = "auto"')
    if fault:
        del layer.forward
        return fault
    for frame in parts.frames:
        frame.adopt()
    return None


def _tolerance(wanted: dict[str, torch.Tensor], float8: bool) -> float:
    """bfloat16 rounds every product it keeps; FP8 keeps three bits of a factor."""
    if float8:
        return 0.25
    return 1e-3 if wanted["the output"].dtype == torch.float32 else 3e-2
