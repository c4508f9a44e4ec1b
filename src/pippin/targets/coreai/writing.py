"""Quantized folder to Core AI bundle: export, convert, save, run the file beside PyTorch."""

import time
from collections.abc import Iterator
from pathlib import Path

from pippin.errors import ModelError
from pippin.events import Event
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
from pippin.targets.coreai.guide import guide
from pippin.targets.coreai.parts import CoreAiParts
from pippin.targets.coreai.program import save
from pippin.targets.coreai.runtime import AimodelModel
from pippin.targets.decoder import Weights
from pippin.targets.families import refuse_family
from pippin.targets.folder import Folder

FILE = "model.aimodel"
RUNTIME = "a program of Core AI's own runtime, in float32 on the CPU"
# The same codes and float32 on both sides.
MAX_KL, MIN_TOP1 = 1e-4, 0.98
GREEDY_TOKENS = 4


def write(bundle: Bundle) -> Iterator[Event]:
    """Fill `bundle.folder`, which exists; events carry stage `deploy`.

    Raises ModelError for a model that is not built, and PippinError where the file computes
    something else than the quantized model does in PyTorch.
    """
    for refusal in refuse_family("coreai", bundle.quantized, masked=True):
        raise ModelError(*refusal)
    context, tokenizer = require_context(bundle), load_tokenizer(bundle.quantized)
    started = time.perf_counter()
    save(Weights(CoreAiParts(), Folder(bundle.quantized), context), bundle.folder / FILE)
    copy_side_files(bundle)
    yield progress(1, started)
    prompts, left_out = check_prompts(tokenizer, context)
    yield from (notice("coreai", text) for text in left_out)
    model = AimodelModel(bundle.folder / FILE, context)
    yield progress(2, started)
    # A step expands every weight here: the longest prompts, and few steps.
    parent = load_parent(bundle.quantized)
    agreement = compare(model, parent, prompts[-2:], context, GREEDY_TOKENS)
    check = require("coreai", agreement, MAX_KL, MIN_TOP1)
    description = describe(bundle, "coreai", tokenizer, {FILE: "weights and program"})
    finish(bundle, description | {"runtime": RUNTIME, "check": check}, guide)
    yield progress(3, started)


def load(folder: Path) -> AimodelModel:
    """The bundle's .aimodel. Raises ModelError where a file is not as it was written."""
    description = read_description(folder)
    return AimodelModel(folder / FILE, description["context"])
