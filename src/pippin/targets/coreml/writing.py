"""Quantized folder to Core ML bundle: export, convert, save, read back, run beside PyTorch."""

import hashlib
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pippin.errors import ModelError, PippinError
from pippin.events import Event
from pippin.model.quantized import DenseView
from pippin.model.tokenizer import Tokenizer, load_tokenizer
from pippin.targets import Bundle
from pippin.targets.agreement import Effort
from pippin.targets.bundle import (
    copy_side_files,
    describe,
    finish,
    notice,
    progress,
    read_description,
    require_context,
)
from pippin.targets.coreml.guide import guide
from pippin.targets.coreml.parts import CoreMlParts
from pippin.targets.coreml.program import save
from pippin.targets.coreml.runtime import PackageModel
from pippin.targets.decoder import Weights
from pippin.targets.families import refuse_family
from pippin.targets.folder import Folder
from pippin.targets.gate import Limits, gate
from pippin.targets.prompts import gate_prompts

FILE = "model.mlpackage"
RUNTIME = "its own program in numpy, rounded to float16: Core ML itself was not run"
# Activations are rounded to float16 after every operator. Numpy takes its time: few prompts, their
# beginnings.
LIMITS = Limits(
    target="coreml",
    max_kl=0.01,
    min_top1=0.9,
    effort=Effort(stepped=1, whole=False),
)


def write(bundle: Bundle) -> Iterator[Event]:
    """Fill `bundle.folder`, which exists; events carry stage `deploy`.

    Raises ModelError for a model or codes that Core ML cannot hold, and PippinError where the file
    holds other weights, or computes something else, than the quantized model.
    """
    for refusal in refuse_family("coreml", bundle.quantized):
        raise ModelError(*refusal)
    context, tokenizer = require_context(bundle), load_tokenizer(bundle.quantized)
    started, folder = time.perf_counter(), Folder(bundle.quantized)
    weights = Weights(CoreMlParts(), folder, context)
    save(weights, bundle.folder / FILE)
    copy_side_files(bundle)
    yield progress(1, started)
    model = PackageModel(bundle.folder / FILE, context)
    wide = _overflowing(model, tokenizer, bundle.gate_prompts)
    if wide:
        yield notice("coreml", f"float16 does not hold {_named(wide)}: computed in float32")
        save(weights, bundle.folder / FILE, wide)
        model = PackageModel(bundle.folder / FILE, context)
    stored = _require_stored(model, folder, DenseView(bundle.quantized))
    check = yield from gate(bundle, tokenizer, LIMITS, lambda: model)
    description = describe(bundle, "coreml", tokenizer, {FILE: "weights and program"})
    said = {
        "runtime": RUNTIME,
        "delegation": model.report(),
        "check": check,
        "stored": stored,
        "float32": sorted(wide),
    }
    finish(bundle, description | said, guide)
    yield progress(2, started)


def _overflowing(model: PackageModel, tokenizer: Tokenizer, count: int) -> dict[str, float]:
    """Operators whose results no float16 holds on the gate's prompts, and the largest of each."""
    prompts, _ = gate_prompts(tokenizer, model.context, count)
    model.tolerant = True
    for prompt in prompts:
        model.last_logits(prompt, 0)
    model.tolerant = False
    return model.overflowed


def _named(operators: dict[str, float]) -> str:
    """The first of some operators, their number and the largest value."""
    first, largest = next(iter(operators)), max(operators.values())
    return f"{len(operators)} operators, the first {first}, values up to {largest:.3g}"


def load(folder: Path) -> PackageModel:
    """The bundle's package. Raises ModelError where a file is not as it was written."""
    description = read_description(folder)
    return PackageModel(folder / FILE, description["context"])


def _require_stored(model: PackageModel, folder: Folder, view: DenseView) -> int:
    """How many matrices the package holds as codes: all, each with the values of one of ours."""
    names = [name for name in view.tensors if folder.is_quantized(name.removesuffix(".weight"))]
    wanted = Counter(_mark(view.read(name)) for name in names if name.endswith(".weight"))
    found = Counter(_mark(matrix) for matrix in model.matrices())
    if missing := (wanted - found).total() + (found - wanted).total():
        raise PippinError(
            f"coreml: {missing} of {wanted.total()} matrices are not stored with the quantized "
            "model's values",
            "Core ML's scales are float16: keep tensors with smaller ones dense (quantize.keep), "
            "or use the version of coremltools that pippin names",
        )
    return wanted.total()


def _mark(matrix: NDArray[np.float32]) -> bytes:
    # A zero has no sign in codes.
    return hashlib.sha256((matrix + np.float32(0)).tobytes()).digest()
