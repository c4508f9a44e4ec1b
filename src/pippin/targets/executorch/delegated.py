"""Quantized folder to the .pte of a delegate that takes the whole decoder: made, then checked.

What differs between such delegates is a Delegate; XNNPACK's own way is in writing.py.

Shape letters: B batch (1), T tokens, V vocab.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from executorch.exir import EdgeProgramManager
from executorch.exir.lowered_backend_module import LoweredBackendModule
from numpy.typing import NDArray
from torch import Tensor, nn

from pippin.engines import Scorer
from pippin.errors import ModelError, PippinError
from pippin.events import Event
from pippin.model.tokenizer import load_tokenizer
from pippin.targets import Bundle
from pippin.targets.bundle import (
    copy_side_files,
    describe,
    finish,
    notice,
    progress,
    read_description,
    require_context,
)
from pippin.targets.decoder import Decoder, Weights
from pippin.targets.executorch import lowering
from pippin.targets.executorch.delegation import Delegation, read_delegation
from pippin.targets.executorch.writing import PROGRAM, runner_constants
from pippin.targets.families import refuse_family
from pippin.targets.folder import Folder
from pippin.targets.gate import Limits, gate
from pippin.targets.guide import Guide
from pippin.targets.native_log import without_harmless_lines
from pippin.targets.quiet import quiet
from pippin.targets.stepping import SteppingModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Delegate:
    """One delegate. `runtime` says what `open` runs the file in, for deploy.json.

    `limits` are those of the target's gate; `why` says what keeps an operator outside the delegate;
    `full_calls` whether one call may fill the whole context, which is another program for some.
    Without `open` nothing here runs the file, and the program that was handed over runs instead.
    """

    limits: Limits
    backend: str
    runtime: str
    full_calls: bool
    read_weights: Callable[[Folder, int], Weights]
    lower: Callable[[torch.export.ExportedProgram, dict[str, Any]], EdgeProgramManager]
    open: Callable[[Path, int], Scorer] | None
    why: str
    guide: Callable[[dict[str, Any]], Guide]

    @property
    def target(self) -> str:
        """Its name in the table of targets."""
        return self.limits.target


class _Float32(nn.Module):
    """The decoder with logits in float32, whatever it computes in."""

    def __init__(self, decoder: Decoder):
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens_BT: Tensor, input_pos: Tensor) -> Tensor:
        """As Decoder.forward."""
        return self.decoder(tokens_BT, input_pos).float()


class GraphModel(SteppingModel):
    """The program as its delegate was given it, in PyTorch: what a file cannot show here."""

    def __init__(self, program: torch.export.ExportedProgram, context: int) -> None:
        super().__init__(context)
        self._program = program.module()
        for module in self._program.modules():
            if isinstance(module, LoweredBackendModule):
                _remove_assertions(module.original_module.graph_module)

    def last_logits(self, tokens: Sequence[int], start: int) -> NDArray[np.float32]:
        """Logits after the last of some tokens, (V,); see SteppingModel."""
        self.require_room(start + len(tokens))
        ids_BT = torch.tensor([[int(token) for token in tokens]])
        with torch.no_grad(), without_harmless_lines():
            return self._program(ids_BT, torch.tensor([start]))[0].numpy()


def _remove_assertions(module: torch.fx.GraphModule) -> None:
    """The exporter takes a call for two tokens at least and asserts that the last slot is free.

    No runtime has these assertions.
    """
    for node in list(module.graph.nodes):
        if node.target == torch.ops.aten._assert_scalar.default:
            module.graph.erase_node(node)
    module.recompile()


def write(delegate: Delegate, bundle: Bundle) -> Iterator[Event]:
    """Fill `bundle.folder`, which exists; events carry stage `deploy`.

    Raises ModelError for a model that is not built, and PippinError where the delegate leaves much
    of it outside or the file computes something else than the quantized model does in PyTorch.
    """
    for refusal in refuse_family(delegate.target, bundle.quantized):
        raise ModelError(*refusal)
    context, tokenizer = require_context(bundle), load_tokenizer(bundle.quantized)
    started, path = time.perf_counter(), bundle.folder / PROGRAM
    with quiet():
        weights = delegate.read_weights(Folder(bundle.quantized), context)
        edge = _lower(delegate, weights, runner_constants(tokenizer, weights))
        del weights
        graph = edge.exported_program().graph_module
        delegation = read_delegation(graph, delegate.backend, lambda operator: delegate.why)
        _require_whole(delegate, delegation)
        with path.open("wb") as file:
            lowering.serialize(edge).write_to_file(file)
    load_file = _opener(delegate, path, edge, context)
    del edge
    copy_side_files(bundle)
    yield progress(1, started)
    if delegate.open is None:
        yield notice(delegate.target, "nothing here runs the file, held-out rows are not scored")
    check = yield from gate(bundle, tokenizer, delegate.limits, load_file)
    yield progress(2, started)
    said = {
        "runtime": delegate.runtime,
        "backend": delegate.backend,
        "delegation": asdict(delegation),
        "check": check,
    }
    files = {PROGRAM: "weights and program"}
    finish(bundle, describe(bundle, delegate.target, tokenizer, files) | said, delegate.guide)


def load(delegate: Delegate, folder: Path) -> Scorer:
    """The bundle's .pte.

    Raises ModelError where a file is missing or not as it was written, PippinError where nothing
    here runs it.
    """
    description = read_description(folder)
    if delegate.open is None:
        raise PippinError(
            f"{folder / PROGRAM} runs on a device with {delegate.backend} only",
            "the README beside it says how; here use the quantized model it was made from",
        )
    with quiet():
        return delegate.open(folder / PROGRAM, description["context"])


def _lower(delegate: Delegate, weights: Weights, constants: dict[str, Any]) -> EdgeProgramManager:
    context = weights.shape.context
    longest = context if delegate.full_calls else context - 1
    program = lowering.export(_Float32(Decoder(weights, every=False)), longest)
    return delegate.lower(program, constants)


def _opener(
    delegate: Delegate, path: Path, edge: EdgeProgramManager, context: int
) -> Callable[[], Scorer]:
    if delegate.open is None:
        return functools.partial(GraphModel, edge.exported_program(), context)
    return functools.partial(delegate.open, path, context)


def _require_whole(delegate: Delegate, delegation: Delegation) -> None:
    if delegation.subgraphs != 1:
        left = [row.operator for row in delegation.operators if row.left]
        raise PippinError(
            f"{delegate.target}: the delegate cut the program into {delegation.subgraphs} pieces, "
            f"one was expected; outside are {', '.join(left) or 'none'}",
            "use the version of executorch that pippin names",
        )
