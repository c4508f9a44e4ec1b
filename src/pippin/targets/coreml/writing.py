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
from pippin.model.tokenizer import load_tokenizer
from pippin.targets import Bundle
from pippin.targets.agreement import compare, load_parent, require
from pippin.targets.bundle import (
    check_prompts,
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

FILE = "model.mlpackage"
RUNTIME = "its own program in numpy, rounded to float16: Core ML itself was not run"
# Activations are rounded to float16 after every operator.
MAX_KL, MIN_TOP1 = 0.01, 0.95
CHECKED_TOKENS, GREEDY_TOKENS = 24, 4


def write(bundle: Bundle) -> Iterator[Event]:
    """Fill `bundle.folder`, which exists; events carry stage `deploy`.

    Raises ModelError for a model or codes that Core ML cannot hold, and PippinError where the file
    holds other weights, or computes something else, than the quantized model.
    """
    for refusal in refuse_family("coreml", bundle.quantized, masked=True):
        raise ModelError(*refusal)
    context, tokenizer = require_context(bundle), load_tokenizer(bundle.quantized)
    started, folder = time.perf_counter(), Folder(bundle.quantized)
    save(Weights(CoreMlParts(), folder, context), bundle.folder / FILE)
    copy_side_files(bundle)
    yield progress(1, started)
    model = PackageModel(bundle.folder / FILE, context)
    stored = _require_stored(model, folder, DenseView(bundle.quantized))
    prompts, left_out = check_prompts(tokenizer, context)
    yield from (notice("coreml", text) for text in left_out)
    # Numpy takes its time: the beginnings of the longest prompts, and few steps.
    short = [prompt[:CHECKED_TOKENS] for prompt in prompts[-2:]]
    agreement = compare(model, load_parent(bundle.quantized), short, context, GREEDY_TOKENS)
    check = require("coreml", agreement, MAX_KL, MIN_TOP1)
    description = describe(bundle, "coreml", tokenizer, {FILE: "weights and program"})
    finish(bundle, description | {"runtime": RUNTIME, "check": check, "stored": stored}, guide)
    yield progress(2, started)


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
