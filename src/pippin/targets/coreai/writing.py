"""Quantized folder to Core AI bundle: export, convert, save, run the file beside PyTorch."""

import time
from collections.abc import Iterator
from pathlib import Path

from pippin.errors import ModelError
from pippin.events import Event
from pippin.model.tokenizer import load_tokenizer
from pippin.targets import Bundle
from pippin.targets.agreement import Effort
from pippin.targets.bundle import (
    copy_side_files,
    describe,
    finish,
    progress,
    read_description,
    require_context,
)
from pippin.targets.coreai.guide import guide
from pippin.targets.coreai.parts import CoreAiParts
from pippin.targets.coreai.program import save
from pippin.targets.coreai.runtime import AimodelModel
from pippin.targets.decoder import Weights
from pippin.targets.families import refuse_family
from pippin.targets.folder import Folder
from pippin.targets.gate import Limits, gate

FILE = "model.aimodel"
RUNTIME = "a program of Core AI's own runtime, in float32 on the CPU"
# The same codes and float32 on both sides. A call expands every weight here, whatever its length.
LIMITS = Limits(
    target="coreai",
    max_kl=1e-4,
    min_top1=0.98,
    effort=Effort(stepped=1),
)


def write(bundle: Bundle) -> Iterator[Event]:
    """Fill `bundle.folder`, which exists; events carry stage `deploy`.

    Raises ModelError for a model that is not built, and PippinError where the file computes
    something else than the quantized model does in PyTorch.
    """
    for refusal in refuse_family("coreai", bundle.quantized):
        raise ModelError(*refusal)
    context, tokenizer = require_context(bundle), load_tokenizer(bundle.quantized)
    started = time.perf_counter()
    save(Weights(CoreAiParts(), Folder(bundle.quantized), context), bundle.folder / FILE)
    copy_side_files(bundle)
    yield progress(1, started)
    check = yield from gate(
        bundle, tokenizer, LIMITS, lambda: AimodelModel(bundle.folder / FILE, context)
    )
    description = describe(bundle, "coreai", tokenizer, {FILE: "weights and program"})
    finish(bundle, description | {"runtime": RUNTIME, "check": check}, guide)
    yield progress(2, started)


def load(folder: Path) -> AimodelModel:
    """The bundle's .aimodel. Raises ModelError where a file is not as it was written."""
    description = read_description(folder)
    return AimodelModel(folder / FILE, description["context"])
