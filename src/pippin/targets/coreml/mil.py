"""Core ML's MIL operators in numpy: runs a saved .mlpackage where Core ML itself cannot.

Every result is rounded to the dtype its operator declares, so a float16 that overflows is seen
(https://apple.github.io/coremltools/source/coremltools.converters.mil.mil.ops.defs.html).
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Values: TypeAlias = dict[str, Any]
_CASTS = {"fp16": np.float32, "fp32": np.float32, "bool": np.bool_}


def run(operator: str, given: Values) -> NDArray[Any]:
    """The operator's result; floats are computed in float32. KeyError for an unknown one."""
    return np.asarray(OPERATORS[operator](given))


def expand_blocks(given: Values) -> NDArray[np.float32]:
    """Codes times their block's scale, an offset taken off first where there is one."""
    codes, scale = given["data"].astype(np.float32), given["scale"].astype(np.float32)
    if given.get("offset") is not None:
        codes = codes - _spread(given["offset"].astype(np.float32), codes.shape)
    return codes * _spread(scale, codes.shape)


def _spread(values: NDArray[np.float32], shape: tuple[int, ...]) -> NDArray[np.float32]:
    for axis, size in enumerate(shape):
        values = np.repeat(values, size // values.shape[axis], axis)
    return values


def _linear(given: Values) -> NDArray[Any]:
    product = given["x"] @ given["weight"].T
    return product if given.get("bias") is None else product + given["bias"]


def _matmul(given: Values) -> NDArray[Any]:
    x, y = given["x"], given["y"]
    x = x.swapaxes(-1, -2) if given.get("transpose_x") else x
    return x @ (y.swapaxes(-1, -2) if given.get("transpose_y") else y)


def _softmax(given: Values) -> NDArray[Any]:
    x, axis = given["x"], int(given["axis"])
    powers = np.exp(x - x.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


def _reduce(reduce: Callable[..., Any]) -> Callable[[Values], Any]:
    def call(given: Values) -> Any:
        axes = tuple(int(a) for a in np.atleast_1d(given["axes"]))
        return reduce(given["x"], axis=axes, keepdims=bool(given["keep_dims"]))

    return call


def _expand_dims(given: Values) -> NDArray[Any]:
    return np.expand_dims(given["x"], tuple(int(a) for a in np.atleast_1d(given["axes"])))


def _squeeze(given: Values) -> NDArray[Any]:
    axes = given.get("axes")
    return np.squeeze(given["x"], None if axes is None else tuple(int(a) for a in axes))


def _slices(given: Values) -> tuple[Any, ...]:
    rank = given["x"].ndim
    flags = {
        key: np.broadcast_to(False if given.get(key) is None else given[key], rank)
        for key in ("begin_mask", "end_mask", "squeeze_mask")
    }
    strides = np.ones(rank, int) if given.get("stride") is None else given["stride"]
    return tuple(
        int(given["begin"][i])
        if flags["squeeze_mask"][i]
        else slice(
            None if flags["begin_mask"][i] else int(given["begin"][i]),
            None if flags["end_mask"][i] else int(given["end"][i]),
            int(strides[i]),
        )
        for i in range(rank)
    )


def _slice_update(given: Values) -> NDArray[Any]:
    changed = given["x"].copy()
    changed[_slices(given)] = given["update"]
    return changed


def _cast(given: Values) -> NDArray[Any]:
    return np.asarray(given["x"]).astype(_CASTS.get(str(given["dtype"]), np.int32))


def _gather(given: Values) -> NDArray[Any]:
    return np.take(given["x"], np.asarray(given["indices"]).astype(np.int64), int(given["axis"]))


def _range(given: Values) -> NDArray[Any]:
    return np.arange(int(given["start"]), int(given["end"]), int(given["step"]), dtype=np.int32)


def _gelu(given: Values) -> NDArray[Any]:
    assert given["mode"] == "TANH_APPROXIMATION", given["mode"]
    x = given["x"]
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _ints(values: Any) -> list[int]:
    return [int(value) for value in np.atleast_1d(values)]


OPERATORS: dict[str, Callable[[Values], Any]] = {
    "abs": lambda g: np.abs(g["x"]),
    "add": lambda g: g["x"] + g["y"],
    "cast": _cast,
    "concat": lambda g: np.concatenate([np.atleast_1d(v) for v in g["values"]], int(g["axis"])),
    "equal": lambda g: g["x"] == g["y"],
    "expand_dims": _expand_dims,
    "floor_div": lambda g: g["x"] // g["y"],
    "gather": _gather,
    "gelu": _gelu,
    "greater": lambda g: g["x"] > g["y"],
    "greater_equal": lambda g: g["x"] >= g["y"],
    "identity": lambda g: g["x"],
    "inverse": lambda g: 1 / (g["x"] + g["epsilon"]),
    "less": lambda g: g["x"] < g["y"],
    "less_equal": lambda g: g["x"] <= g["y"],
    "linear": _linear,
    "logical_and": lambda g: g["x"] & g["y"],
    "matmul": _matmul,
    "maximum": lambda g: np.maximum(g["x"], g["y"]),
    "minimum": lambda g: np.minimum(g["x"], g["y"]),
    "mod": lambda g: g["x"] % g["y"],
    "mul": lambda g: g["x"] * g["y"],
    "range_1d": _range,
    "real_div": lambda g: g["x"] / g["y"],
    "reduce_max": _reduce(np.max),
    "reduce_mean": _reduce(np.mean),
    "reshape": lambda g: g["x"].reshape(_ints(g["shape"])),
    "rsqrt": lambda g: 1 / np.sqrt(g["x"] + g["epsilon"]),
    "select": lambda g: np.where(g["cond"], g["a"], g["b"]),
    "shape": lambda g: np.array(g["x"].shape, np.int32),
    "silu": lambda g: g["x"] / (1 + np.exp(-g["x"])),
    "slice_by_index": lambda g: g["x"][_slices(g)],
    "slice_update": _slice_update,
    "softmax": _softmax,
    "squeeze": _squeeze,
    "sub": lambda g: g["x"] - g["y"],
    "tanh": lambda g: np.tanh(g["x"]),
    "tile": lambda g: np.tile(g["x"], _ints(g["reps"])),
    "transpose": lambda g: g["x"].transpose(_ints(g["perm"])),
}
