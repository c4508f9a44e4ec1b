"""What of a lowered program runs in XNNPACK: by operator, in subgraphs, as a share of the work."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from executorch.exir.lowered_backend_module import get_lowered_submodules

# Operators that multiply matrices, by a part of their name.
_LINEAR = "aten.linear"
_ATTENTION = "llama.custom_sdpa"


@dataclass(frozen=True, kw_only=True, slots=True)
class Delegation:
    """Nodes by operator inside and outside of XNNPACK.

    `flops_share` is XNNPACK's part of the multiplications for one token at a full context; what is
    left is attention, which ExecuTorch's own operator computes.
    """

    subgraphs: int
    delegated: dict[str, int]
    undelegated: dict[str, int]
    flops_share: float


def read_delegation(graph_module: torch.fx.GraphModule) -> Delegation:
    """The report of a lowered program's graph."""
    lowered = get_lowered_submodules(graph_module)
    inside = [node for _, sub, _ in lowered for node in sub.original_module.graph.nodes]
    outside = list(graph_module.graph.nodes)
    done, left = sum(map(_macs, inside)), sum(map(_macs, outside))
    return Delegation(
        subgraphs=len(lowered),
        delegated=_count(inside),
        undelegated=_count(outside),
        flops_share=done / (done + left),
    )


def _count(nodes: list[torch.fx.Node]) -> dict[str, int]:
    names = (_name(node) for node in nodes if node.op == "call_function")
    counts = Counter(name for name in names if name not in ("executorch_call_delegate", "getitem"))
    return dict(sorted(counts.items()))


def _name(node: torch.fx.Node) -> str:
    # A functionalized call names the operator it stands for in its first argument.
    target: Any = node.target
    if "auto_functionalized" in str(target):
        target = node.args[0]
    name = str(getattr(target, "__name__", target)).removesuffix(".default")
    return "executorch_call_delegate" if "call_delegate" in name else name


def _macs(node: torch.fx.Node) -> int:
    """Multiplications for one token."""
    if node.op != "call_function":
        return 0
    name = _name(node)
    if _LINEAR in name:
        return _rows_of_a_token(node) * math.prod(_shape(node, 1))
    if _ATTENTION in name:
        query, keys = _shape(node, 0), _shape(node, 1)
        return 2 * keys[1] * query[2] * query[3]
    return 0


def _rows_of_a_token(node: torch.fx.Node) -> int:
    shape = _shape(node, 0)
    return int(shape[2]) if len(shape) == 4 else 1


def _shape(node: torch.fx.Node, argument: int) -> torch.Size:
    source = node.args[argument]
    assert isinstance(source, torch.fx.Node)
    return source.meta["val"].shape
