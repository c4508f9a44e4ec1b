"""Our own code in the place of a network's decoder layers, where it gives the same numbers."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel

from pippin.engines.torch.attention import WIDEST
from pippin.engines.torch.frames import Frame
from pippin.engines.torch.parts import take_apart
from pippin.engines.torch.probe import Ability
from pippin.engines.torch.trial import (
    Call,
    decoder_layers,
    difference,
    drawn_batch,
    going_on,
    layer_calls,
    results,
)
from pippin.errors import ModelError
from pippin.recipe import Train

TRIED = 96  # tokens, on a CPU
Made: TypeAlias = tuple[Callable[..., Any], Sequence[Frame]]


def replace_layers(network: PreTrainedModel, ability: Ability, train: Train) -> str | None:
    """Replace every layer's forward, its linears' products in FP8 where the recipe says so.

    Output and gradients are compared with the plain layer's on the same inputs. Where one differs,
    or has other parts, all layers are left as they were and the reason is returned. Raises
    ModelError where FP8 changes a layer by more than it may.
    """
    layers, on_cpu = decoder_layers(network), network.device.type == "cpu"
    others = [parts for parts in map(take_apart, layers) if isinstance(parts, str)]
    if others:
        return others[0]
    if on_cpu:  # which takes micro-batches of any shape
        train = replace(train, batch_rows=1, row_tokens=TRIED)
    batch = drawn_batch(network, train, 1)
    batch = going_on(batch) if ability.shares else batch
    rows = ability.layout(batch, network.device)
    packing = rows.extra.get("packing")
    if not layers or packing is None or packing.math:
        return "its attention is not ours"
    if packing.first_T is None and not on_cpu:
        return "its attention is not one kernel for all samples"
    calls = layer_calls(network, layers, rows)
    float8, make = train.frozen_dtype == "float8", _maker(on_cpu, train, len(layers))
    for number, (layer, call) in enumerate(zip(layers, calls, strict=True)):
        made = make(layer, number)
        if layer is layers[-1]:  # which may go on with what is read
            packing.read_S = rows.index_S[::2]
        fault = made if isinstance(made, str) else _replace(layer, made, call, number, float8)
        packing.read_S = None
        if fault:
            for done in layers[:number]:
                del done.forward
            return fault
    for layer in layers:
        layer.forward = _recomputing(layer)
    return None


def _replace(layer: nn.Module, made: Made, call: Call, number: int, float8: bool) -> str | None:
    forward, frames = made
    asked = layer, call, number > 0, call.kwargs["packing"].read_S
    wanted = results(*asked)
    layer.forward = forward
    tolerance = _tolerance(wanted, float8)
    fault = difference(wanted, results(*asked), tolerance, f"layer {number}")
    if fault and float8 and number > 0:
        raise ModelError(fault, 'set train.frozen_dtype = "auto"')
    if fault:
        del layer.forward
        return fault
    for frame in frames:
        frame.adopt()
    return None


def _recomputing(layer: Any) -> Callable[..., Any]:
    """The layer's forward, with gradient checkpointing where that is asked.

    transformers asks around a forward or, from 5.24 on, inside the class's own, which is not run.
    """
    forward = layer.forward
    if not getattr(layer, "gradient_checkpointing", False):
        return forward
    layer.gradient_checkpointing, again = False, layer._gradient_checkpointing_func

    def call(*args: Any, **kwargs: Any) -> Any:
        if not (layer.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        return again(functools.partial(forward, **kwargs), *args)

    return call


def _on_cuda(layer: nn.Module, float8: bool, last: bool) -> str | Made:
    from pippin.engines.torch.layer import find_parts, forward_of

    parts = find_parts(layer, float8, last)
    if isinstance(parts, str):
        return parts
    if parts.heads[2] > WIDEST:
        return f"its heads are wider than {WIDEST}"
    return forward_of(parts), parts.frames


def _maker(on_cpu: bool, train: Train, layers: int) -> Callable[[nn.Module, int], str | Made]:
    """What makes a layer, given its number, of our own code."""
    if not on_cpu:
        float8 = train.frozen_dtype == "float8"
        return lambda layer, number: _on_cuda(layer, float8, number == layers - 1)
    from pippin.engines.torch.cpu_layer import Room, find_parts, forward_of

    room = None if train.recomputed else Room()

    def make(layer: nn.Module, number: int) -> str | Made:
        parts = find_parts(layer, number, number == layers - 1, room)
        return parts if isinstance(parts, str) else (forward_of(parts), ())

    return make


def _tolerance(wanted: dict[str, torch.Tensor], float8: bool) -> float:
    """bfloat16 rounds every product it keeps; FP8 keeps three bits of a factor.

    On a CPU attention's gradients come from float32 on one side, from bfloat16 on the other.
    """
    if float8:
        return 0.25
    output = wanted["the output"]
    if output.dtype == torch.float32:
        return 1e-3
    return 1e-1 if output.device.type == "cpu" else 3e-2
