"""Which operators of a lowered program its delegate took: how many, of what share of the work.

What stayed outside says why. A share is that of the multiplications for one token at a full
context; sizes that are not fixed count as 1.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from executorch.exir.lowered_backend_module import get_lowered_submodules

_ATTENTION = ("custom_sdpa", "scaled_dot_product_attention")
_SIZES = "integers for shapes and positions, which ExecuTorch computes itself"
_OWN = "an operator of ExecuTorch's own for caches and attention"
_UNCOUNTED = ("call_delegate", "getitem")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One operator: nodes inside and outside the delegate, its share of the arithmetic."""

    operator: str
    delegated: int
    left: int
    share: float
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Delegation:
    """`flops_share` is the delegate's part of the arithmetic; rows with the most of it first."""

    delegate: str
    subgraphs: int
    flops_share: float
    operators: list[Row]


def read_delegation(
    graph_module: torch.fx.GraphModule, delegate: str, why: Callable[[str], str]
) -> Delegation:
    """The report of a lowered program's graph; `why` says what keeps an operator outside."""
    lowered = get_lowered_submodules(graph_module)
    inside = _calls(node for _, sub, _ in lowered for node in sub.original_module.graph.nodes)
    outside = _calls(graph_module.graph.nodes)
    taken, left = (Counter(map(_name, nodes)) for nodes in (inside, outside))
    work: Counter[str] = Counter()
    for node in (*inside, *outside):
        work[_name(node)] += _macs(node)
    whole = work.total()
    rows = [
        Row(
            operator=name,
            delegated=taken[name],
            left=left[name],
            share=work[name] / whole,
            why=_reason(name, why) if left[name] else "",
        )
        for name in sorted(work, key=lambda name: (-work[name], -taken[name] - left[name], name))
    ]
    return Delegation(
        delegate=delegate,
        subgraphs=len(lowered),
        flops_share=sum(map(_macs, inside)) / whole,
        operators=rows,
    )


def _reason(name: str, why: Callable[[str], str]) -> str:
    if "." not in name or name.startswith(("aten.sym_", "aten._local_scalar", "aten.item")):
        return _SIZES
    return _OWN if name.startswith("llama.") else why(name)


def _calls(nodes: Iterable[torch.fx.Node]) -> list[torch.fx.Node]:
    calls = (node for node in nodes if node.op == "call_function")
    return [node for node in calls if not any(text in _name(node) for text in _UNCOUNTED)]


def _name(node: torch.fx.Node) -> str:
    # A functionalized call names the operator it stands for in its first argument.
    target: Any = node.target
    if "auto_functionalized" in str(target):
        target = node.args[0]
        return str(target).removesuffix(".default")
    return str(getattr(target, "__name__", target)).removesuffix(".default")


def _macs(node: torch.fx.Node) -> int:
    """Multiplications for one token."""
    name = _name(node)
    if any(part in name for part in _ATTENTION):
        # Two products with a cache whose heads are an axis among others.
        query, keys = _shape(node.args[0]), _shape(node.args[1])
        heads = math.prod(query) // keys[-1]
        slots = math.prod(keys) // (keys[-1] * _kv_heads(name, keys))
        return 2 * heads * slots * keys[-1]
    if "linear" in name:
        return math.prod(_shape(node.args[0])[:-1]) * math.prod(_shape(node.args[1]))
    if name.split(".")[-1] in ("mm", "bmm", "addmm", "matmul"):
        left = node.args[1] if "addmm" in name else node.args[0]
        return math.prod(_shape(node)) * _shape(left)[-1]
    return 0


def _kv_heads(name: str, keys: list[int]) -> int:
    # llama.custom_sdpa has (B, S, K, C), the others (B, K, S, C).
    return keys[2] if name.startswith("llama.") else keys[1]


def _shape(node: Any) -> list[int]:
    return [_size(size) for size in node.meta["val"].shape]


def _size(size: Any) -> int:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, 1)))
