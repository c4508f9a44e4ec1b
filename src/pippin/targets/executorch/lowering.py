"""Modules to exported programs to a .pte, provenance shared instead of copied."""

import contextlib
import copy
import importlib
import types
import warnings
from collections.abc import Generator, Sequence
from typing import Any

import torch
from executorch.backends.xnnpack._passes.convert_to_linear import ConvertToLinearPass
from executorch.exir import (
    EdgeCompileConfig,
    EdgeProgramManager,
    ExecutorchBackendConfig,
    ExecutorchProgramManager,
    to_edge_transform_and_lower,
)
from executorch.exir.backend.partitioner import Partitioner
from executorch.exir.passes import LegalizePortableDimOrderPass, MemoryPlanningPass
from executorch.exir.passes.normalize_transpose_pass import NormalizeTransposePass
from executorch.exir.passes.remove_mixed_type_operators import RemoveMixedTypeOperators
from executorch.exir.passes.replace_broken_ops_with_function_ops_pass import (
    ReplaceBrokenOpsWithFunctionalOpsPass,
)
from executorch.exir.passes.sym_to_tensor_pass import SymToTensorPass
from torch import nn
from torch.fx.passes.infra.pass_base import PassBase, PassResult

# Rewrites of scalars and sizes among tensors, of transposes, other dtypes and orders of dimensions,
# of products that are no linear: layers.py has none of them.
IDLE: tuple[Any, ...] = (
    NormalizeTransposePass,
    LegalizePortableDimOrderPass,
    RemoveMixedTypeOperators,
    ReplaceBrokenOpsWithFunctionalOpsPass,
    SymToTensorPass,
    ConvertToLinearPass,
)


@contextlib.contextmanager
def tracing() -> Generator[None]:
    """How a pass runs: no gradients, shared provenance, no warnings meant for its authors."""
    with torch.no_grad(), shared_provenance(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", "Mutation on a buffer", UserWarning)
        yield


@contextlib.contextmanager
def shared_provenance() -> Generator[None]:
    """Let torch.fx share the records of where a node came from while the context is open.

    They are never changed, yet deep-copied for every node in every pass: a chain that grows with
    each pass makes lowering slower than linear.
    """
    traceback: Any = importlib.import_module("torch.fx.traceback")

    def share(value: Any, memo: Any = None) -> Any:
        return list(value) if isinstance(value, list) else value

    original = traceback.copy
    traceback.copy = types.SimpleNamespace(deepcopy=share, copy=copy.copy)
    try:
        yield
    finally:
        traceback.copy = original


def export(decoder: nn.Module, max_tokens: int) -> torch.export.ExportedProgram:
    """The decoder as a graph for 1 to max_tokens tokens a call; what nothing reads is out."""
    example = (torch.zeros((1, 3), dtype=torch.long), torch.tensor([0]))
    length = torch.export.Dim("length", min=1, max=max_tokens)
    with tracing():
        program = torch.export.export(
            decoder, example, dynamic_shapes=({1: length}, None), strict=False
        )
    _drop_unread(program)
    return program


def _drop_unread(program: torch.export.ExportedProgram) -> None:
    """Take out buffers without readers, a tied matrix's second name among them.

    ExecuTorch drops parameters that nothing reads, and writes such buffers as constants.
    """
    graph, signature = program.graph, program.graph_signature
    graph.eliminate_dead_code()
    buffers = signature.inputs_to_buffers
    unread = [n for n in graph.nodes if n.op == "placeholder" and n.name in buffers and not n.users]
    for node in unread:
        program.state_dict.pop(buffers[node.name], None)
        graph.erase_node(node)
    gone = {node.name for node in unread}
    signature.input_specs[:] = [s for s in signature.input_specs if s.arg.name not in gone]
    program.graph_module.recompile()


def lower(
    program: torch.export.ExportedProgram,
    constants: dict[str, Any],
    partitioner: Partitioner,
    passes: Sequence[Any] = (),
    skip_dim_order: bool = True,
) -> EdgeProgramManager:
    """The program, delegated where `partitioner` says; `constants` become methods beside it."""
    with tracing():
        return to_edge_transform_and_lower(
            program,
            transform_passes=list(passes),
            partitioner=[partitioner],
            constant_methods=constants,
            compile_config=EdgeCompileConfig(
                _check_ir_validity=False, _skip_dim_order=skip_dim_order
            ),
        )


@contextlib.contextmanager
def without_idle_passes() -> Generator[None]:
    """Let some passes return their graph as it is: each would trace it again, to change nothing."""

    def idle(self: PassBase, graph_module: torch.fx.GraphModule) -> PassResult:
        return PassResult(graph_module, False)

    for rewrite in IDLE:
        assert "__call__" not in vars(rewrite), rewrite
        rewrite.__call__ = idle
    try:
        yield
    finally:
        for rewrite in IDLE:
            del rewrite.__call__


def serialize(edge: EdgeProgramManager) -> ExecutorchProgramManager:
    """The .pte in memory, the delegates' data in segments of their own that load lazily."""
    with tracing(), without_idle_passes():
        return edge.to_executorch(
            ExecutorchBackendConfig(
                extract_delegate_segments=True,
                memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False),
            )
        )
