"""Quantized folder to MLX bundle: the same tensors, a config mlx-lm understands, a comparison."""

from collections.abc import Iterator
from pathlib import Path

from pippin.engines import Scorer, load_engine
from pippin.events import Event
from pippin.model.config import read_raw, with_rope_keys, write_raw
from pippin.model.source import link_or_copy
from pippin.model.tokenizer import load_tokenizer
from pippin.targets import Bundle
from pippin.targets.bundle import (
    copy_side_files,
    describe,
    finish,
    read_description,
    require_context,
)
from pippin.targets.gate import Limits, gate
from pippin.targets.mlx.guide import guide

# Both compute in float32 from the same codes.
LIMITS = Limits(target="mlx", max_kl=1e-4, min_top1=0.98)
RUNTIME = "a model of mlx-lm in float32, on a CPU with its codes made dense by MLX"


def write(bundle: Bundle) -> Iterator[Event]:
    """Fill `bundle.folder`, which exists; events carry stage `deploy`.

    Raises ModelError for a folder that mlx-lm does not load, and PippinError where it computes
    something else than the quantized model does in PyTorch.
    """
    require_context(bundle)
    tokenizer = load_tokenizer(bundle.quantized)
    copy_side_files(bundle)
    write_raw(bundle.folder, with_rope_keys(read_raw(bundle.quantized)))
    files = {"config.json": "the architecture, and how each tensor is quantized"}
    for path in sorted(bundle.quantized.glob("model*.safetensors*")):
        link_or_copy(path, bundle.folder / path.name)
        files[path.name] = "weights"
    check = yield from gate(bundle, tokenizer, LIMITS, lambda: _open(bundle.folder))
    description = describe(bundle, "mlx", tokenizer, files)
    finish(bundle, description | {"runtime": RUNTIME, "check": check}, guide)


def load(folder: Path) -> Scorer:
    """The bundle in mlx-lm. Raises ModelError where a file is not as it was written."""
    read_description(folder)
    return _open(folder)


def _open(folder: Path) -> Scorer:
    return load_engine("mlx").load(folder, "float32")
