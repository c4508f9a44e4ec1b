"""Quantized folder to bundle: export, lower, write, describe, and prove what was written."""

import functools
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pippin.errors import ModelError
from pippin.events import Event, Metric
from pippin.model.config import read_config
from pippin.model.tokenizer import Tokenizer, load_tokenizer
from pippin.targets import Bundle
from pippin.targets.bundle import (
    copy_side_files,
    describe,
    finish,
    notice,
    progress,
    read_description,
    require_context,
)
from pippin.targets.decoder import Weights
from pippin.targets.executorch import lowering, stretches
from pippin.targets.executorch.check import prove
from pippin.targets.executorch.delegation import read_delegation
from pippin.targets.executorch.guide import guide
from pippin.targets.executorch.parts import read_weights
from pippin.targets.executorch.runtime import PteModel
from pippin.targets.executorch.sharing import share_segments
from pippin.targets.executorch.stored import require_stored
from pippin.targets.families import refuse_family
from pippin.targets.folder import Folder
from pippin.targets.gate import Limits, gate
from pippin.targets.prompts import gate_prompts

PROGRAM, BACKEND = "model.pte", "xnnpack"
RUNTIME = "a program of ExecuTorch's own runtime"
# XNNPACK rounds what goes into a matrix to 8 bits, which the quantized model in PyTorch does not;
# check.py holds every layer, on so many prompts, to one that does, and is strict.
PROVEN_ON = 6
LIMITS = Limits(target="executorch", max_kl=0.2, min_top1=0.7)

TWICE = (
    "the tied embedding is in the file twice: of two 4-bit codes in a byte XNNPACK reads the lower "
    "half first, the lookup the upper"
)


def write(bundle: Bundle) -> Iterator[Event]:
    """Fill `bundle.folder`, which exists; events carry stage `deploy`.

    Raises ModelError for a model or codes that XNNPACK cannot hold, or another model's tokenizer,
    and PippinError where the written file computes something else than the quantized model.
    """
    for refusal in refuse_family("executorch", bundle.quantized):
        raise ModelError(*refusal)
    context = require_context(bundle)
    tokenizer = load_tokenizer(bundle.quantized)
    started = time.perf_counter()
    weights = read_weights(Folder(bundle.quantized), context)
    edge = stretches.lower(weights, runner_constants(tokenizer, weights))
    graph = edge.exported_program().graph_module
    delegation = read_delegation(graph, BACKEND, stretches.why)
    yield progress(1, started)
    with (bundle.folder / PROGRAM).open("wb") as file:
        lowering.serialize(edge).write_to_file(file)
    del edge
    shared = share_segments(bundle.folder / PROGRAM)
    if read_config(bundle.quantized).tied_embeddings and not shared:
        yield notice("executorch", TWICE)
    copy_side_files(bundle)
    yield progress(2, started)
    said = {
        "runtime": RUNTIME,
        "backend": BACKEND,
        "delegation": asdict(delegation),
        "shared_bytes": shared,
    }
    stored, layers = _proven(bundle, tokenizer, weights)
    yield Metric(stage="deploy", step=0, values={k: float(v) for k, v in layers.items()})
    del weights
    check = yield from gate(bundle, tokenizer, LIMITS, functools.partial(_open, bundle))
    said |= {"stored": stored, "check": check | {"layers": layers}}
    files = {PROGRAM: "weights and program"}
    finish(bundle, describe(bundle, "executorch", tokenizer, files) | said, guide)
    yield progress(3, started)


def _proven(bundle: Bundle, tokenizer: Tokenizer, weights: Weights) -> tuple[int, dict[str, Any]]:
    """How many tensors are stored as they were quantized, and the layers' figures."""
    path = bundle.folder / PROGRAM
    stored = require_stored(path, weights)
    prompts, _ = gate_prompts(tokenizer, bundle.context, PROVEN_ON)
    return stored, asdict(prove(path, weights, prompts))


def _open(bundle: Bundle) -> PteModel:
    return PteModel(bundle.folder / PROGRAM, bundle.context)


def load(folder: Path) -> PteModel:
    """The bundle's .pte. Raises ModelError where a file is missing or not as it was written."""
    description = read_description(folder)
    return PteModel(folder / PROGRAM, description["context"])


def runner_constants(tokenizer: Tokenizer, weights: Weights) -> dict[str, Any]:
    """The constant methods that ExecuTorch's LLM runners read from a .pte."""
    return {
        "get_max_seq_len": weights.shape.context,
        "get_max_context_len": weights.shape.context,
        "get_vocab_size": weights.shape.vocab_size,
        "get_bos_id": tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id,
        "get_eos_ids": sorted(tokenizer.stop_ids),
        "get_n_layers": weights.shape.num_layers,
        "use_kv_cache": True,
        "enable_dynamic_shape": True,
        "use_sdpa_with_kv_cache": True,
    }
