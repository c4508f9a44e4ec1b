"""Exported programs to a .pte: one subgraph a layer, provenance shared instead of copied."""

import contextlib
import copy
import importlib
import types
import warnings
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.backends.xnnpack.xnnpack_preprocess import XnnpackBackend
from executorch.exir import (
    EdgeCompileConfig,
    EdgeProgramManager,
    ExecutorchBackendConfig,
    ExecutorchProgramManager,
    to_edge_transform_and_lower,
)
from executorch.exir.backend.canonical_partitioners.config_partitioner import is_constant_data
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner
from executorch.exir.passes import LegalizePortableDimOrderPass, MemoryPlanningPass
from executorch.exir.passes.normalize_transpose_pass import NormalizeTransposePass
from executorch.exir.passes.remove_mixed_type_operators import RemoveMixedTypeOperators
from executorch.exir.passes.replace_broken_ops_with_function_ops_pass import (
    ReplaceBrokenOpsWithFunctionalOpsPass,
)
from executorch.exir.passes.sym_to_tensor_pass import SymToTensorPass
from torch import nn
from torch.fx import Node
from torch.fx.passes.infra.partitioner import Partition
from torch.fx.passes.infra.pass_base import PassBase, PassResult

# Scalars and sizes among tensors, transposes, other dtypes and orders of dimensions: layers.py has
# none of them.
IDLE: tuple[Any, ...] = (
    NormalizeTransposePass,
    LegalizePortableDimOrderPass,
    RemoveMixedTypeOperators,
    ReplaceBrokenOpsWithFunctionalOpsPass,
    SymToTensorPass,
)


class LevelPartitioner(XnnpackPartitioner):
    """XNNPACK's own rules for what it takes, with as few subgraphs as the graph allows.

    A node's level is the number of undelegated stretches before it. Nodes of one level form one
    subgraph: data flows between levels only upwards, so no cycle can arise and no pair of
    candidates has to be tried. The stock merge tries every pair, minutes for 30 layers.
    """

    def __init__(self) -> None:
        super().__init__()
        # With this spec the backend runs one of its seventeen rewriting passes. Each of them traces
        # the subgraph again, and none finds anything to change in the forms of layers.py.
        specs = [CompileSpec("dqlinear_partitioner", b"")]
        self.delegation_spec = DelegationSpec(XnnpackBackend.__name__, specs)

    def ops_to_not_decompose(self, ep: Any) -> tuple[list[Any], None]:
        """What reaches XNNPACK whole; with no filter a node, one rewrite does, not three."""
        operators, _ = super().ops_to_not_decompose(ep)
        return operators, None

    def why(self, operator: str) -> str:
        """What keeps an operator outside."""
        known = {name.removesuffix(".default") for name in self.target_partitioner_configs}
        if operator.removeprefix("aten.") in known:
            return "not in this form: XNNPACK has it for fixed sizes and floats only"
        return "no such operator in XNNPACK"

    def generate_partitions(self, ep: Any) -> list[Partition]:
        """One partition a level, with the constants that only it reads."""
        groups = self.get_matched_nodes_from_configs(ep)
        taken = {node for group in groups for node in group if node.op == "call_function"}
        nodes = ep.graph.nodes
        constants = {node for node in nodes if is_constant_data(ep, node)}
        members: dict[int, list[Node]] = {}
        for node, level in _levels(nodes, taken, constants).items():
            members.setdefault(level, []).append(node)
        return [Partition(id=level, nodes=found) for level, found in members.items()]


def _levels(nodes: Iterable[Node], taken: set[Node], constants: set[Node]) -> dict[Node, int]:
    """The level of every taken node and of the constants that one level alone reads."""
    level: dict[Node, int] = {}
    for node in nodes:
        entered = (
            level[source] + (node in taken and source.op == "call_function" and source not in taken)
            for source in node.all_input_nodes
        )
        level[node] = max(entered, default=0)
    found = {node: level[node] for node in taken if not constants.issuperset(node.all_input_nodes)}
    # Constants, and nodes computed from constants alone, go where they are read: a weight and its
    # dequantization belong to their linear. Backwards, so that a chain of them is followed.
    for node in reversed(list(nodes)):
        if node in constants or (node in taken and node not in found):
            readers = {found.get(user) for user in node.users}
            only = readers.pop() if len(readers) == 1 else None
            if only is not None:
                found[node] = only
    return found


@contextlib.contextmanager
def _tracing() -> Generator[None]:
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
    """The decoder as a graph that takes 1 to max_tokens tokens a call."""
    example = (torch.zeros((1, 3), dtype=torch.long), torch.tensor([0]))
    length = torch.export.Dim("length", min=1, max=max_tokens)
    with _tracing():
        return torch.export.export(
            decoder, example, dynamic_shapes=({1: length}, None), strict=False
        )


def lower(
    program: torch.export.ExportedProgram,
    constants: dict[str, Any],
    partitioner: Partitioner,
    passes: Sequence[Any] = (),
    skip_dim_order: bool = True,
) -> EdgeProgramManager:
    """The program, delegated where `partitioner` says; `constants` become methods beside it."""
    with _tracing():
        return to_edge_transform_and_lower(
            program,
            transform_passes=list(passes),
            partitioner=[partitioner],
            constant_methods=constants,
            compile_config=EdgeCompileConfig(
                _check_ir_validity=False, _skip_dim_order=skip_dim_order
            ),
        )


def lower_levels(
    program: torch.export.ExportedProgram, constants: dict[str, Any], partitioner: LevelPartitioner
) -> EdgeProgramManager:
    """The program for XNNPACK, without rewrites that find nothing in the forms of layers.py."""
    with without_idle_passes():
        return lower(program, constants, partitioner)


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
    with _tracing():
        return edge.to_executorch(
            ExecutorchBackendConfig(
                extract_delegate_segments=True,
                memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False),
            )
        )
