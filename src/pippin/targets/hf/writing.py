"""Quantized folder to Hugging Face bundle: codes as compressed-tensors packs them, the rest dense.

Its packing of symmetric codes is that of our layout, so a packed tensor is copied as it is; a
scheme names the linears that have it (https://github.com/vllm-project/compressed-tensors).
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pippin.events import Event
from pippin.model import names
from pippin.model.config import read_raw, without_quantization, write_raw
from pippin.model.quantized import DenseView, layout
from pippin.model.tokenizer import load_tokenizer
from pippin.model.weights import Spec, Writer
from pippin.quantizers import Grid
from pippin.targets import Bundle
from pippin.targets.bundle import (
    copy_side_files,
    describe,
    finish,
    notice,
    require_context,
)
from pippin.targets.folder import Folder
from pippin.targets.gate import Limits, gate
from pippin.targets.hf import PACKED_BITS
from pippin.targets.hf.guide import guide
from pippin.targets.hf.loading import loads_packed, open_folder

RUNTIME = "a model of transformers, in float32"
# What was expanded is rounded to the model's own dtype once more.
LIMITS = Limits(target="hf", max_kl=0.02, min_top1=0.95)


def write(bundle: Bundle) -> Iterator[Event]:
    """Fill `bundle.folder`, which exists; events carry stage `deploy`.

    Raises PippinError where transformers computes something else from it than the quantized model.
    """
    require_context(bundle)
    tokenizer = load_tokenizer(bundle.quantized)
    view = DenseView(bundle.quantized)
    packed = _packed(view, Folder(bundle.quantized)) if loads_packed(bundle.quantized) else {}
    copy_side_files(bundle)
    raw = without_quantization(read_raw(bundle.quantized))
    schemes = {"quantization_config": _schemes(view, packed)} if packed else {}
    write_raw(bundle.folder, raw | schemes)
    expanded = _write_weights(bundle.folder, view, packed)
    if expanded:
        yield notice("hf", f"{expanded} quantized tensors are stored dense, in the model's dtype")
    check = yield from gate(bundle, tokenizer, LIMITS, lambda: open_folder(bundle.folder))
    files = {path.name: "weights" for path in sorted(bundle.folder.glob("model*.safetensors"))}
    description = describe(bundle, "hf", tokenizer, files)
    counts = {"packed": len(packed), "expanded": expanded}
    finish(bundle, description | {"runtime": RUNTIME, "check": check, **counts}, guide)


def _packed(view: DenseView, folder: Folder) -> dict[str, Grid]:
    """The modules whose codes compressed-tensors holds: symmetric linears of 4 or 8 bits."""
    found = {}
    for name, spec in view.tensors.items():
        module = names.module(name)
        # Its readers leave a head as it is.
        linear = names.is_linear(name, spec.shape) and not names.is_head(module)
        grid = layout(view.config, module)
        if not linear or grid is None or not folder.is_quantized(module):
            continue
        bits, symmetric = folder.grid(module)
        if symmetric and bits in PACKED_BITS:
            found[module] = grid
    return found


def _schemes(view: DenseView, packed: dict[str, Grid]) -> dict[str, Any]:
    """config.json's quantization_config; every group names its linears."""
    groups: dict[tuple[int, int], list[str]] = defaultdict(list)
    for module, grid in packed.items():
        groups[grid.bits, grid.group_size].append(module)
    linears = (n for n, spec in view.tensors.items() if names.is_linear(n, spec.shape))
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": sorted({names.module(name) for name in linears} - packed.keys()),
        "config_groups": {
            f"group_{i}": {"targets": modules, "weights": _scheme(*key)}
            for i, (key, modules) in enumerate(sorted(groups.items()))
        },
    }


def _scheme(bits: int, group_size: int) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": group_size,
        "dynamic": False,
    }


def _write_weights(folder: Path, view: DenseView, packed: dict[str, Grid]) -> int:
    """Write model.safetensors; how many quantized tensors were expanded."""
    specs: dict[str, Any] = {}
    for name, spec in view.tensors.items():
        module = names.module(name)
        specs |= _packed_specs(view, module) if module in packed else {name: spec}
    expanded = 0
    with Writer(folder, specs) as writer:
        for name, spec in view.tensors.items():
            module = names.module(name)
            if module in packed:
                for part, tensor in _packed_tensors(view, module).items():
                    writer.write(part, tensor)
            else:
                expanded += name in view.grids
                writer.write(name, view.read(name).astype(spec.dtype))
    return expanded


def _packed_specs(view: DenseView, module: str) -> dict[str, Spec]:
    tensors = view.checkpoint.tensors
    words, scales = tensors[f"{module}.weight"], tensors[f"{module}.scales"]
    return {
        f"{module}.weight_packed": Spec(shape=words.shape, dtype=np.dtype(np.int32)),
        f"{module}.weight_scale": Spec(shape=scales.shape, dtype=scales.dtype),
        f"{module}.weight_shape": Spec(shape=(2,), dtype=np.dtype(np.int64)),
    }


def _packed_tensors(view: DenseView, module: str) -> dict[str, NDArray[Any]]:
    return {
        f"{module}.weight_packed": view.checkpoint.read(f"{module}.weight").view(np.int32),
        f"{module}.weight_scale": view.checkpoint.read(f"{module}.scales"),
        f"{module}.weight_shape": np.array(view.tensors[f"{module}.weight"].shape, np.int64),
    }
