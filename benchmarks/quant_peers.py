"""Other programs' quantizers: a matrix and bits in, what is left of the matrix out.

Packages that are not installed may lie in a folder on PYTHONPATH; libggml-base, which
`llama_iq4_nl` calls, is found by the path in GGML_BASE.
"""

import ctypes
import os
from collections.abc import Callable
from functools import cache
from importlib import metadata
from typing import TypeAlias

import numpy as np

Peer: TypeAlias = Callable[[np.ndarray, int], np.ndarray]
PACKAGES = ("mlx", "gguf", "hqq")
# GGML's numbers of its types.
IQ4_NL, Q8_0 = 20, 8


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
    return lambda weight, bits: peer(weight, 4)


def linears(peer: Peer, few: int) -> Peer:
    """The same with `few` bits in the place of 4."""
    return lambda weight, bits: peer(weight, few if bits == 4 else bits)


def mlx_affine(weight: np.ndarray, bits: int) -> np.ndarray:
    """MLX's own affine quantizer, groups of 64."""
    return _mlx(weight, group_size=64, bits=bits, mode="affine")


def mlx_mxfp4(weight: np.ndarray, bits: int) -> np.ndarray:
    """MLX's mxfp4, groups of 32 with a scale of one byte; affine for 8 bits."""
    if bits == 8:
        return mlx_affine(weight, bits)
    return _mlx(weight, group_size=32, bits=bits, mode="mxfp4")


def _mlx(weight: np.ndarray, **how: int | str) -> np.ndarray:
    import mlx.core as mx

    parts = mx.quantize(mx.array(weight).astype(mx.bfloat16), **how)
    return np.array(mx.dequantize(*parts, **how).astype(mx.float32))


def gguf_symmetric(weight: np.ndarray, bits: int) -> np.ndarray:
    """GGUF's Q4_0, or Q8_0 for 8 bits: symmetric groups of 32."""
    from gguf import GGMLQuantizationType, quants

    kind = {4: GGMLQuantizationType.Q4_0, 8: GGMLQuantizationType.Q8_0}[bits]
    return quants.dequantize(quants.quantize(weight, kind), kind)


def llama_iq4_nl(weight: np.ndarray, bits: int) -> np.ndarray:
    """llama.cpp's quantizer to IQ4_NL, or Q8_0 for 8 bits: groups of 32, 4.5 bits."""
    from gguf import GGMLQuantizationType, quants

    kind = {4: IQ4_NL, 8: Q8_0}[bits]
    rows, columns = weight.shape
    source = np.ascontiguousarray(weight, np.float32)
    packed = np.empty((rows, columns // 32 * {4: 18, 8: 34}[bits]), np.uint8)
    pointers = (source.ctypes.data, packed.ctypes.data)
    written = _ggml().ggml_quantize_chunk(kind, *pointers, 0, rows, columns, None)
    assert written == packed.nbytes, written
    return quants.dequantize(packed, GGMLQuantizationType(kind))


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


def hqq_affine(weight: np.ndarray, bits: int) -> np.ndarray:
    """The hqq package's own rounds, groups of 64."""
    import torch
    from hqq.core.quantize import Quantizer

    tensor = torch.from_numpy(weight)
    packed, meta = Quantizer.quantize(
        tensor, nbits=bits, group_size=64, axis=1, device="cpu", compute_dtype=torch.float32
    )
    return Quantizer.dequantize(packed, meta).float().numpy()
