"""Proves that a .pte holds every linear's codes and scales, byte for byte.

The comparison of logits cannot: rounding of activations hides a wrong scale in one deep layer.

Shape letters: O outputs, D inputs, G groups.
"""

import hashlib
from pathlib import Path

import torch
from executorch.exir._serialize._program import deserialize_pte_binary
from torch import Tensor

from pippin.errors import PippinError
from pippin.targets.decoder import Weights
from pippin.targets.executorch.layers import PlainLinear, QuantizedLinear


def require_stored(path: Path, weights: Weights) -> int:
    """How many tensors were found, all that linears have. Raises PippinError where one is missing.

    XNNPACK's data lies in the file under the sha256 of its bytes; contents are hashed again here.
    """
    data = deserialize_pte_binary(path.read_bytes()).named_data
    held = {_sha256(entry) for entry in data.buffers if isinstance(entry, bytes)} if data else set()
    wanted = {
        f"{name}.{part}": _sha256(_bytes(tensor))
        for name, module in weights.named_modules()
        for part, tensor in _expected(module).items()
    }
    missing = [name for name, digest in wanted.items() if digest not in held]
    if missing:
        raise PippinError(
            f"executorch: {path.name} does not hold {missing[0]} as it was quantized "
            f"({len(missing)} of {len(wanted)} tensors differ)",
            "use the versions of executorch and torch that pippin names",
        )
    return len(wanted)


def _expected(module: torch.nn.Module) -> dict[str, Tensor]:
    if isinstance(module, PlainLinear):
        return {"weight": module.weight}
    if not isinstance(module, QuantizedLinear):
        return {}
    if module.bits == 8:
        return {"codes": module.codes, "scales": module.scales}
    # Two codes to a byte, offset by 8, the even one low; block scales in bfloat16.
    shifted_OD = (module.codes + 8).view(torch.uint8)
    packed = shifted_OD[:, ::2] | shifted_OD[:, 1::2] << 4
    return {"codes": packed, "scales": module.scales.bfloat16()}


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
