"""Other programs' quantizers: a matrix and bits in, what is left of the matrix out.

Calibrated ones get X^T X of the inputs as well, the same that our own read, by a call.

Packages that are not installed may lie in a folder on PYTHONPATH; libggml-base, which
`llama` calls, is found by the path in GGML_BASE.
"""

import contextlib
import ctypes
import io
import os
from collections.abc import Callable
from functools import cache
from importlib import metadata
from typing import TypeAlias

import numpy as np

Moment: TypeAlias = Callable[[], np.ndarray]
Peer: TypeAlias = Callable[[np.ndarray, int, Moment], np.ndarray]
PACKAGES = ("mlx", "mlx-lm", "gguf", "hqq", "llmcompressor")


def versions() -> dict[str, str]:
    """Those that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def whole(peer: Peer) -> Peer:
    """The same with 4 bits for the embedding as well."""
    return lambda weight, bits, moment: peer(weight, 4, moment)


def linears(peer: Peer, few: int) -> Peer:
    """The same with `few` bits in the place of 4."""
    return lambda weight, bits, moment: peer(weight, few if bits == 4 else bits, moment)


def mlx_affine(weight: np.ndarray, bits: int, moment: Moment) -> np.ndarray:
    """MLX's own affine quantizer, groups of 64."""
    return _mlx(weight, group_size=64, bits=bits, mode="affine")


def mlx_mxfp4(weight: np.ndarray, bits: int, moment: Moment) -> np.ndarray:
    """MLX's mxfp4, groups of 32 with a scale of one byte; affine for 8 bits."""
    if bits == 8:
        return mlx_affine(weight, bits, moment)
    return _mlx(weight, group_size=32, bits=bits, mode="mxfp4")


def _mlx(weight: np.ndarray, **how: int | str) -> np.ndarray:
    import mlx.core as mx

    parts = mx.quantize(mx.array(weight).astype(mx.bfloat16), **how)
    return np.array(mx.dequantize(*parts, **how).astype(mx.float32))


def mlx_gptq(weight: np.ndarray, bits: int, moment: Moment) -> np.ndarray:
    """mlx-lm's GPTQ, groups of 64, of one linear that reads a square root of X^T X."""
    import mlx.core as mx
    from mlx import nn
    from mlx_lm.quant.gptq import gptq_quantize

    if bits == 8:
        return mlx_affine(weight, bits, moment)
    linear = nn.Linear(*weight.shape[::-1], bias=False)
    linear.weight = mx.array(weight).astype(mx.bfloat16)
    matrix = moment().astype(np.float64)
    matrix += 1e-6 * np.diag(matrix).mean() * np.eye(len(matrix))
    inputs = mx.array(np.linalg.cholesky(matrix).T.astype(np.float32))[None]
    with contextlib.redirect_stderr(io.StringIO()):
        made = gptq_quantize(nn.Sequential(linear), inputs, bits, 64, bits, 64)[0].layers[0]
    dense = mx.dequantize(made.weight, made.scales, made.biases, group_size=64, bits=bits)
    return np.array(dense.astype(mx.float32))


def compressor_gptq(weight: np.ndarray, bits: int, moment: Moment) -> np.ndarray:
    """llm-compressor's GPTQ as it comes (order by activation), affine groups of 64."""
    import torch
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.utils import calculate_qparams
    from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight

    if bits == 8:
        return mlx_affine(weight, bits, moment)
    how = QuantizationArgs(
        num_bits=bits, symmetric=False, strategy="group", group_size=64, actorder="static"
    )
    tensor, matrix = torch.from_numpy(weight.copy()), torch.from_numpy(moment().copy())
    groups = tensor.unflatten(-1, (-1, 64))
    grids = [part[None] for part in calculate_qparams(groups.amin(-1), groups.amax(-1), how)]
    return quantize_weight(tensor[None], matrix[None], *grids, None, how)[0][0].numpy()


def gguf_symmetric(weight: np.ndarray, bits: int, moment: Moment) -> np.ndarray:
    """GGUF's Q4_0, or Q8_0 for 8 bits: symmetric groups of 32."""
    from gguf import GGMLQuantizationType, quants

    kind = {4: GGMLQuantizationType.Q4_0, 8: GGMLQuantizationType.Q8_0}[bits]
    return quants.dequantize(quants.quantize(weight, kind), kind)


def llama(kind: str, *, weighed: bool = False, otherwise: str = "") -> Peer:
    """llama.cpp's quantizer to a type, or Q8_0 for 8 bits.

    `weighed`: by an importance matrix, the diagonal of X^T X, as its imatrix is. Where blocks of
    256 do not divide a row the type is `otherwise`, as in its files; without one they go on into
    the next row, which no file can have: the type's own bits.
    """

    def peer(weight: np.ndarray, bits: int, moment: Moment) -> np.ndarray:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

        number = GGMLQuantizationType["Q8_0" if bits == 8 else kind]
        rows, columns = weight.shape
        if otherwise and columns % GGML_QUANT_SIZES[number][0]:
            number = GGMLQuantizationType[otherwise]
        block, size = GGML_QUANT_SIZES[number]
        importance = np.tile(np.diag(moment()), rows) if weighed and bits != 8 else None
        if columns % block:
            rows, columns = 1, weight.size
        elif importance is not None:
            importance = importance[:columns]
        source = np.ascontiguousarray(weight.reshape(rows, columns), np.float32)
        packed = np.empty((rows, columns // block * size), np.uint8)
        given = None if importance is None else np.ascontiguousarray(importance, np.float32)
        pointers = (source.ctypes.data, packed.ctypes.data)
        trusted = None if given is None else given.ctypes.data
        written = _ggml().ggml_quantize_chunk(number, *pointers, 0, rows, columns, trusted)
        assert written == packed.nbytes, written
        return quants.dequantize(packed, number).reshape(weight.shape)

    return peer


def llama_both(kind: str, otherwise: str = "") -> dict[str, Peer]:
    """The type as it comes and by importance, with their labels."""
    label = f"llama.cpp {kind}" + (f" or {otherwise}" if otherwise else "")
    plain, weighed = (llama(kind, weighed=w, otherwise=otherwise) for w in (False, True))
    return {label: plain, f"{label}, imatrix": weighed}


@cache
def _ggml() -> ctypes.CDLL:
    library = ctypes.CDLL(os.environ["GGML_BASE"])
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        *[ctypes.c_int64] * 3,
        ctypes.c_void_p,
    ]
    return library


def hqq_affine(weight: np.ndarray, bits: int, moment: Moment) -> np.ndarray:
    """The hqq package's own rounds, groups of 64."""
    import torch
    from hqq.core.quantize import Quantizer

    tensor = torch.from_numpy(weight)
    packed, meta = Quantizer.quantize(
        tensor, nbits=bits, group_size=64, axis=1, device="cpu", compute_dtype=torch.float32
    )
    return Quantizer.dequantize(packed, meta).float().numpy()
