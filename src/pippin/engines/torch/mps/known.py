"""Calls that MPS refuses for their arguments, and calls it is known to get wrong (known.toml).

Shape letters: M rows, N columns, K the inner length of a product.
"""

import functools
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from pippin.engines.torch.mps.verdicts import Verdict

HALF = (torch.float16, torch.bfloat16)
ATTENTION = "_scaled_dot_product_attention_math_for_mps"
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
CHIPS = ("m1", "m2", "m3", "m4", "m5")


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One operator call: its name without overload, and all its arguments by name."""

    name: str
    values: dict[str, Any]

    @classmethod
    def of(cls, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Call":
        """Positions become names, what was left out its default."""
        arguments = operator._schema.arguments
        values = {a.name: a.default_value for a in arguments if a.has_default_value()}
        values |= dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        return cls(name=operator._schema.name.partition("::")[2], values=values)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def product(self) -> tuple[Tensor, Tensor] | None:
        """The two factors, where it is a matrix product."""
        if self.name not in PRODUCTS:
            return None
        names = {"mm": ("self", "mat2"), "addmm": ("mat1", "mat2"), "bmm": ("self", "mat2")}
        left, right = names.get(self.name, ("batch1", "batch2"))
        return self[left], self[right]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One known fault."""

    thread: str
    when: str
    what: str
    remedy: str
    fixed: str = ""
    chips: tuple[str, ...] = ()

    def holds(self, version: str, chip: str | None) -> bool:
        """Whether this PyTorch on this chip has it; no chip stands for any."""
        old = not self.fixed or _numbers(version) < _numbers(self.fixed)
        return old and (chip is None or not self.chips or chip in self.chips)

    @property
    def verdict(self) -> Verdict:
        """What the report says."""
        where = f" on {', '.join(self.chips).upper()}" if self.chips else ""
        since = f", fixed in PyTorch {self.fixed}" if self.fixed else ""
        why = f"{self.what}{where} ({self.thread}{since})"
        return Verdict(kind="known wrong", why=why, remedy=self.remedy)


@functools.cache
def load_rules() -> tuple[Rule, ...]:
    """Every rule of known.toml."""
    text = resources.files("pippin.engines.torch.mps").joinpath("known.toml").read_text()
    rules = tomllib.loads(text)["rule"]
    for rule in rules:
        rule["chips"] = tuple(rule.get("chips", ()))
    return tuple(Rule(**rule) for rule in rules)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def _half_causal_attention(call: Call) -> bool:
    query = call["query"] if call.name == ATTENTION else None
    return query is not None and call["is_causal"] and query.dtype in HALF and query.shape[-2] > 1


def _long_half_decode(call: Call) -> bool:
    return call.name == ATTENTION and call["key"].shape[-2] > 1023 and call["key"].dtype in HALF


def _values_of_other_width(call: Call) -> bool:
    return call.name == ATTENTION and call["value"].shape[-1] != call["query"].shape[-1]


def _huge_scores(call: Call) -> bool:
    if call.name != ATTENTION:
        return False
    return call["query"].shape[:-1].numel() * call["key"].shape[-2] >= 2**31


def _long_inner_product(call: Call) -> bool:
    if call.name == "linear":
        x, weight = call["input"], call["weight"]
        rows = x.numel() // max(x.shape[-1], 1)
        return x.shape[-1] > 32768 and rows >= 16 and weight.shape[0] >= 16
    factors = call.product()
    if factors is None:
        return False
    a, b = factors
    return a.shape[-1] > 32768 and a.shape[-2] >= 16 and b.shape[-1] >= 16


def _half_linear_without_bias(call: Call) -> bool:
    if call.name != "linear" or call["bias"] is not None:
        return False
    return call["input"].dim() > 2 and call["input"].dtype in HALF


def _linear_of_many_rows(call: Call) -> bool:
    if call.name != "linear" or call["bias"] is None:
        return False
    return call["input"].dim() > 2 and call["input"].shape[-3] > 65536


def _huge_table(call: Call) -> bool:
    table = {"embedding": "weight", "index_select": "self"}.get(call.name)
    return table is not None and call[table].numel() > 2**31


def _huge_batched_product(call: Call) -> bool:
    factors = call.product() if call.name in ("bmm", "baddbmm") else None
    if factors is None:
        return False
    a, b = factors
    return a.shape[0] * a.shape[1] * b.shape[2] > 2**32


def _expanded_operand(call: Call) -> bool:
    return any(_expanded(x) for x in call.product() or ())


def _expanded(x: Tensor) -> bool:
    return any(s == 0 and n > 1 for s, n in zip(x.stride(), x.shape, strict=True))


def _strided_batch_norm_gradient(call: Call) -> bool:
    return call.name == "native_batch_norm_backward" and not call["input"].is_contiguous()


def _strided_convolution_weight(call: Call) -> bool:
    weight = call["weight"] if call.name == "convolution" else None
    if weight is None or weight.dim() != 4:
        return False
    last = torch.channels_last
    return not weight.is_contiguous() and not weight.is_contiguous(memory_format=last)


WHEN: dict[str, Callable[[Call], bool]] = {
    "expanded_operand": _expanded_operand,
    "half_causal_attention": _half_causal_attention,
    "half_linear_without_bias": _half_linear_without_bias,
    "huge_batched_product": _huge_batched_product,
    "huge_scores": _huge_scores,
    "huge_table": _huge_table,
    "linear_of_many_rows": _linear_of_many_rows,
    "long_half_decode": _long_half_decode,
    "long_inner_product": _long_inner_product,
    "strided_batch_norm_gradient": _strided_batch_norm_gradient,
    "strided_convolution_weight": _strided_convolution_weight,
    "values_of_other_width": _values_of_other_width,
}


def refusals(call: Call) -> Iterator[str]:
    """Why MPS raises an error for these arguments, though it has the operator."""
    if any(isinstance(x, Tensor) and x.dim() > 16 for x in call.values.values()):
        yield "more than 16 dimensions"
    if call.name in ("_softmax", "_log_softmax") and call["half_to_float"]:
        yield "softmax that turns half precision into float32"
    if call.name == "_weight_int4pack_mm" and call["qGroupSize"] not in (32, 64, 128, 256):
        yield f"int4 groups of {call['qGroupSize']}; it takes 32, 64, 128 and 256"
    if call.name == "_adaptive_avg_pool2d":
        sizes = zip(call["self"].shape[-2:], call["output_size"], strict=True)
        if any(a % b and b % a for a, b in sizes):
            yield "adaptive pooling to sizes that do not divide the input (pytorch#96056)"
    if call.name == "convolution":
        yield from _convolution_refusals(call)
    if call.name == "linear" and not _floating(call["input"]):
        yield "a linear over integers"


def _convolution_refusals(call: Call) -> Iterator[str]:
    x, weight, transposed = call["input"], call["weight"], call["transposed"]
    if not _floating(x):
        yield "a convolution over integers"
    if weight.dim() == 5 and transposed and x.dtype in HALF:
        yield "a transposed 3-D convolution in half precision"
    if (weight.shape[1] if transposed else weight.shape[0]) > 65536:
        yield "a convolution with more than 65,536 outputs"


def _floating(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()
