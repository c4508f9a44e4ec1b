"""SwiGLU that keeps gate and up for its backward and nothing else.

Autograd would keep two more tensors of the feed-forward's width, and run twice as many operations.
"""

import functools
from typing import Any

import mlx.core as mx

from pippin.engines.mlx.elementwise import sigmoid

WIDE = 8  # elements of a thread: 16 bytes of a half-precision dtype
THREADS = 256
# What one thread computes for element i: out[0], and out[1] in the backward, from in[0], in[1] ...
FORWARD = "out[0][i] = static_cast<T>(g * s * u);"
BACKWARD = """float d = static_cast<float>(in[2][i]);
    out[0][i] = static_cast<T>(d * u * s * (1.0f + g * (1.0f - s)));
    out[1][i] = static_cast<T>(d * g * s);"""


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) * up, any shape."""
    outputs: Any = _swiglu(gate, up)
    return outputs


@mx.custom_function
def _swiglu(gate: mx.array, up: mx.array) -> mx.array:
    if fuses(gate) and gate.size % WIDE == 0:
        return _fused(FORWARD, 2, 1, gate.dtype)([gate, up])[0]
    return gate * sigmoid(gate) * up


@_swiglu.vjp
def _backward(primals: Any, cotangent: mx.array, output: Any) -> tuple[mx.array, ...]:
    del output
    gate, up = primals
    if fuses(gate) and gate.size % WIDE == 0:
        return tuple(_fused(BACKWARD, 3, 2, gate.dtype)([gate, up, cotangent]))
    share = sigmoid(gate)
    silu = gate * share
    return cotangent * up * (share + silu * (1 - share)), cotangent * silu


def fuses(x: mx.array) -> bool:
    """Whether a kernel of ours can compute: inside a gradient MLX compiles nothing by itself."""
    return x.dtype.size == 2 and mx.cuda.is_available() and mx.default_device() != mx.cpu


@functools.cache
def _fused(formula: str, inputs: int, outputs: int, dtype: mx.Dtype) -> Any:
    """A kernel over flat arrays of one size, computing in float32."""
    read = [f"in{n}" for n in range(inputs)]
    written = [f"out{n}" for n in range(outputs)]
    loads = "\n".join(f"load(in[{n}], {name});" for n, name in enumerate(read))
    stores = "\n".join(f"store({name}, out[{n}]);" for n, name in enumerate(written))
    source = f"""
    auto first = {WIDE} * static_cast<size_t>(cooperative_groups::this_grid().thread_rank());
    if (first >= static_cast<size_t>(in0_shape[0])) return;
    auto load = [&](T* to, const T* from) {{
        *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from + first);
    }};
    auto store = [&](T* to, T* from) {{
        *reinterpret_cast<float4*>(to + first) = *reinterpret_cast<float4*>(from);
    }};
    alignas(16) T in[{inputs}][{WIDE}];
    alignas(16) T out[{outputs}][{WIDE}];
    {loads}
    #pragma unroll
    for (int i = 0; i < {WIDE}; ++i) {{
        float g = static_cast<float>(in[0][i]), u = static_cast<float>(in[1][i]);
        float s = 1.0f / (1.0f + __expf(-g));
        {formula}
    }}
    {stores}
    """
    kernel: Any = mx.fast.cuda_kernel(
        name=f"swiglu_{inputs}", input_names=read, output_names=written, source=source
    )

    def run(arrays: list[mx.array]) -> list[mx.array]:
        size, shape = arrays[0].size, arrays[0].shape
        flat = kernel(
            inputs=[array.flatten() for array in arrays],
            template=[("T", dtype)],
            grid=(-(-size // (WIDE * THREADS)) * THREADS, 1, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(size,)] * outputs,
            output_dtypes=[dtype] * outputs,
        )
        return [array.reshape(shape) for array in flat]

    return run
