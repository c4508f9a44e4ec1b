"""The MLX delegate's operators in PyTorch, floats computed and kept in float32.

What each means is in MLX's reference (https://ml-explore.github.io/mlx/build/html/python/ops.html)
and the delegate's flatbuffer schema.

Shape letters: B batch, T tokens, O outputs (or vocabulary), I inputs, P packed words, G groups, H
heads, K kv heads, C head channels, S slots of the cache.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pippin.model.quantized import dequantize, unpack

Values: TypeAlias = dict[str, Any]
_INTEGERS = {3: torch.int32, 4: torch.int64, 11: torch.bool}  # ExecuTorch's scalar types


def run(operator: str, given: Values) -> Any:
    """The operator's result, a tensor or an integer. KeyError for an unknown one."""
    return OPERATORS[operator](given)


def expand(given: Values) -> Tensor:
    """The values (O, I) of packed codes (O, P); scales and biases (O, G)."""
    assert given["mode"] == "affine", given["mode"]
    scales_OG, biases_OG = given["scales"].numpy(), given["biases"].numpy()
    width = scales_OG.shape[-1] * given["group_size"]
    codes = unpack(given["w"].numpy().reshape(-1, given["w"].shape[-1]), given["bits"], width)
    flat = (codes, *(s.reshape(-1, s.shape[-1]) for s in (scales_OG, biases_OG)))
    return torch.from_numpy(dequantize(*flat)).reshape(*given["w"].shape[:-1], width)


def multiply(given: Values, weight_OI: Tensor) -> Tensor:
    """Inputs (.., I) to (.., O), where `transpose` says that the weight is (O, I)."""
    return given["x"] @ (weight_OI.mT if given["transpose"] else weight_OI)


def _take(given: Values) -> Tensor:
    index, axis = given["index"], given["axis"]
    if isinstance(index, int):
        return given["x"].select(axis, index)
    # torch has no index_select of unsigned words.
    x = given["x"]
    signed = x.view(torch.int32) if x.dtype == torch.uint32 else x
    picked = signed.index_select(axis, index.reshape(-1))
    shape = (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])
    return picked.view(x.dtype).reshape(shape)


def _rope(given: Values) -> Tensor:
    x_BHTC, half = given["x"], given["dims"] // 2
    assert not given["traditional"]
    assert given["dims"] == x_BHTC.shape[-1]
    positions_T = torch.arange(x_BHTC.shape[-2], dtype=torch.float32) + given["offset"]
    angles_TC = given["scale"] * positions_T[:, None] / given["freqs"]
    cos_TC, sin_TC = angles_TC.cos(), angles_TC.sin()
    a, b = x_BHTC[..., :half], x_BHTC[..., half:]
    return torch.cat((a * cos_TC - b * sin_TC, a * sin_TC + b * cos_TC), -1)


def _attend(given: Values) -> Tensor:
    q_BHTC, k_BKSC, v_BKSC = given["q"], given["k"], given["v"]
    repeat = q_BHTC.shape[1] // k_BKSC.shape[1]
    k_BHSC, v_BHSC = (x.repeat_interleave(repeat, 1) for x in (k_BKSC, v_BKSC))
    tokens, slots = q_BHTC.shape[2], k_BKSC.shape[2]
    # The last query sees every slot.
    causal_TS = torch.ones(tokens, slots, dtype=torch.bool).tril(slots - tokens)
    seen_TS = causal_TS if given["causal"] else given["mask"]
    scores_BHTS = q_BHTC @ k_BHSC.mT * given["scale"]
    return scores_BHTS.masked_fill(~seen_TS, -torch.inf).softmax(-1) @ v_BHSC


def _slices(given: Values) -> tuple[slice, ...]:
    assert given["step"] == 1
    return (slice(None),) * given["axis"] + (slice(given["start"], given["stop"]),)


def _slice_update(given: Values) -> Tensor:
    changed = given["dst"].clone()
    changed[_slices(given)] = given["update"]
    return changed


def _range(given: Values) -> Tensor:
    return torch.arange(given["start"], given["stop"], given["step"])


def _norm(given: Values) -> Tensor:
    x, weight = given["x"], given["weight"]
    return nn.functional.rms_norm(x, weight.shape, weight, given["eps"])


def _addmm(given: Values) -> Tensor:
    product = given["mat1"] @ given["mat2"] * given["alpha"]
    bias = given.get("bias")
    return product if bias is None else product + given["beta"] * bias


OPERATORS: dict[str, Callable[[Values], Any]] = {
    "AddIntNode": lambda g: g["a"] + g["b"],
    "AddNode": lambda g: g["a"] + g["b"],
    "AddmmNode": _addmm,
    "ARangeNode": _range,
    "AsTypeNode": lambda g: g["x"].to(_INTEGERS.get(g["scalar_type"], torch.float32)),
    "ContiguousNode": lambda g: g["x"],
    "DequantizeNode": expand,
    "ExpandDimsNode": lambda g: g["x"].unsqueeze(g["axis"]),
    "GreaterEqualNode": lambda g: g["a"] >= g["b"],
    "IdCopyNode": lambda g: g["x"],
    "ItemIntNode": lambda g: int(g["x"]),
    "LessNode": lambda g: g["a"] < g["b"],
    "LogicalAndNode": lambda g: g["a"] & g["b"],
    "MatmulNode": lambda g: g["a"] @ g["b"],
    "MultiplyNode": lambda g: g["a"] * g["b"],
    "QuantizedMatmulNode": lambda g: multiply(g, expand(g)),
    "RMSNormNode": _norm,
    "ReshapeNode": lambda g: g["x"].reshape(g["shape"]),
    "RopeNode": _rope,
    "SdpaNode": _attend,
    "SigmoidNode": lambda g: g["x"].sigmoid(),
    "SliceNode": lambda g: g["x"][_slices(g)],
    "SliceUpdateNode": _slice_update,
    "SubtractNode": lambda g: g["a"] - g["b"],
    "SymSizeNode": lambda g: g["a"].shape[g["dim"]],
    "TakeNode": _take,
    "TransposeNode": lambda g: g["x"].permute(g["perm"]),
}
