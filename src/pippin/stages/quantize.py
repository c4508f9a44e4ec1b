"""Quantize a model, some rows of one tensor at a time, into MLX's affine layout."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pippin import artifact, memory
from pippin.data.batches import Batch
from pippin.errors import ModelError
from pippin.events import Event, Finished, Notice, Progress, Started
from pippin.job import Job
from pippin.model import names
from pippin.model.config import ModelConfig, read_config, write_raw
from pippin.model.quantized import bits_per_weight
from pippin.model.source import copy_side_files
from pippin.model.weights import Checkpoint, Tensors, Writer
from pippin.quantizers import CALIBRATED
from pippin.quantizers.awq import Folding
from pippin.quantizers.choices import Choice, choose_all, layout_specs, quantized_config
from pippin.recipe import Quantize
from pippin.stages.calibration import Calibration, calibrate, in_layers, passes
from pippin.stages.checkpoints import work_folder
from pippin.stages.coding import Coder, Row
from pippin.stages.folding import fold
from pippin.stages.layers_done import LayersDone
from pippin.stages.merge import Merged
from pippin.stages.recovery import recover, recovery_text, updates
from pippin.stages.revised import Revised
from pippin.stages.sharing import share_bits

STAGE = "quantize"
REPORT = "quantize.json"


def quantize(job: Job) -> Iterator[Event]:
    """Write the quantized folder and `quantize.json`, a row a tensor.

    With an adapter among the inputs its update is in the weights, merged as they are read. Raises
    ModelError for a model that is quantized already, and for weights that are not finite.
    """
    began = time.monotonic()
    settings, source = job.recipe.quantize, open_source(job)
    choices = choose_all(source.tensors, source.config, settings)
    yield Started(stage=STAGE, title=_title(settings), total=len(choices), unit="tensors")
    for text in (*source.notices, *_notices(choices, source.tensors)):
        yield Notice(stage=STAGE, text=text)
    work = _plan(job, source, choices)
    for text in work.notices:
        yield Notice(stage=STAGE, text=text)
    summary: dict[str, Any] = {}
    with artifact.writing(job.folder, job.origin, summary) as folder:
        write_raw(folder, quantized_config(source.config, work.choices, settings))
        copy_side_files(job.inputs["model"], folder)
        rows: list[Row] = []
        done = LayersDone(folder=work_folder(job.folder), origin=job.origin)
        with Writer(folder, layout_specs(source.tensors, work.choices)) as writer:
            for made in _write_all(work.coder(source, writer, settings), work, done):
                if isinstance(made, Notice):
                    yield made
                    continue
                rows.append(made)
                yield Progress(stage=STAGE, done=len(rows), values=_values(made))
        rows.sort(key=lambda row: names.natural(row.name))
        summary |= {**_summary(folder, rows), **work.summary}
        if work.calibration and work.updates:
            summary["recovered"] = recover(work.calibration, work.updates, folder)
            yield Notice(stage=STAGE, text=recovery_text(summary["recovered"]))
        summary["seconds"] = round(time.monotonic() - began, 2)
        report = {**summary, "method": settings.method, "tensors": [asdict(row) for row in rows]}
        (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n")
    done.forget()
    yield Finished(stage=STAGE, folder=str(job.folder), summary=summary)


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """What is quantized: a folder's weights, or those with an adapter's update."""

    tensors: Tensors
    config: ModelConfig
    notices: tuple[str, ...] = ()


def open_source(job: Job) -> Source:
    """The job's weights. Raises ModelError for codes, but under an adapter."""
    if "adapter" in job.inputs:
        merged = Merged(job)
        return Source(tensors=merged, config=merged.config, notices=merged.notices)
    folder = job.inputs["model"]
    config = read_config(folder)
    refuse_quantized(folder, config)
    return Source(tensors=Checkpoint(folder), config=config)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """What is done to every tensor.

    Calibrated methods have a `calibration`, and `parts` as `passes` gives them; `updates` are for
    recovery, `revised` for layers that read what those before them became. `summary` is what the
    manifest keeps of it; the seed is among the settings.
    """

    choices: dict[str, Choice]
    calibration: Calibration | None = None
    parts: tuple[dict[str, str], ...] = ()
    updates: list[Batch] = field(default_factory=list)
    revised: Revised | None = None
    folding: Folding = field(default_factory=Folding)
    notices: tuple[str, ...] = ()
    summary: dict[str, Any] = field(default_factory=dict)

    def coder(self, source: Source, writer: Writer, settings: Quantize) -> Coder:
        """What writes the tensors."""
        return Coder(
            checkpoint=source.tensors, writer=writer, method=settings.method, folding=self.folding
        )


def _plan(job: Job, source: Source, choices: dict[str, Choice]) -> _Work:
    """Read what the method needs, and settle the choices and scales that follow from it."""
    settings = job.recipe.quantize
    parts: tuple[dict[str, str], ...] = ()
    if settings.method in CALIBRATED:
        parts = tuple(passes(source.tensors, choices, source.config, memory.MOMENTS))
    if not parts:
        return _Work(choices=choices)
    # Where moments take several passes, a layer at a time is less work and less memory. Recovery
    # needs the whole model.
    large = settings.sequential or (len(parts) > 1 and not settings.recover_tokens)
    revised = Revised(source.tensors) if settings.sequential else None
    calibration = calibrate(job, revised or source.tensors, large=large)
    if calibration.by_layer:
        parts = tuple(in_layers(parts, back=calibration.by_loss))
    notices, summary, folding = [*calibration.notices], dict[str, Any](), Folding()
    tuned = updates(calibration, job.recipe.model.engine) if settings.recover_tokens else []
    if settings.budget:
        budget = share_bits(calibration, choices, parts, job.recipe)
        choices, summary["budget"] = budget.choices, budget.report
        notices.append(budget.text)
    if CALIBRATED[settings.method].scaled:
        folding = fold(calibration, choices, parts, source.config)
        notices.append(f"inputs of {len(folding.inputs)} linears are scaled")
    summary["calibration_rows"] = calibration.rows
    summary["calibration_tokens"] = calibration.tokens
    return _Work(
        choices=choices,
        calibration=calibration,
        parts=parts,
        updates=tuned,
        revised=revised,
        folding=folding,
        notices=tuple(notices),
        summary=summary,
    )


def refuse_quantized(folder: Path, config: ModelConfig) -> None:
    """Raise ModelError for a model whose weights are codes already."""
    if config.quantization or config.raw.get("quantization_config"):
        raise ModelError(
            f"{folder} is quantized already", "start from the model it was quantized from"
        )


def _write_all(coder: Coder, work: _Work, done: LayersDone) -> Iterator[Row | Notice]:
    """Every tensor; those without a Hessian first, the others layer by layer."""
    asked = {name for part in work.parts for name in part}
    for name, choice in work.choices.items():
        if name not in asked:
            yield coder.write(name, choice, None)
    found = [n for n, (row, _) in done.found.items() if row.bits == _bits(work.choices[n])]
    if work.revised:
        found = []  # what later layers read comes out of finished ones: all are gone through
    if found:
        yield Notice(stage=STAGE, text=f"{len(found)} tensors were finished before")
    for part in work.parts:
        left = {name: linear for name, linear in part.items() if name not in found}
        for name in [name for name in part if name not in left]:
            yield done.restore(name, coder)
        if left:
            yield from _calibrated(coder, left, work, done)


def _calibrated(
    coder: Coder, part: dict[str, str], work: _Work, done: LayersDone
) -> Iterator[Row | Notice]:
    """The tensors of a part; every finished layer is kept."""
    assert work.calibration is not None
    unseen = [names.module(name) for name in work.calibration.unseen(part)]
    if unseen:
        yield Notice(stage=STAGE, text=_unseen(unseen, coder.method))
    layer = names.layer(next(iter(part)))
    for name, hessian in work.calibration.hessians(part):
        if names.layer(name) != layer:
            done.flush(layer)
            layer = names.layer(name)
        row = coder.write(name, work.choices[name], hessian)
        if hessian:
            done.add(row, {key: np.concatenate(rows) for key, rows in coder.parts.items()})
            if work.revised:
                work.revised.put(name, coder.dense(row))
        yield row
    done.flush(layer)


def _bits(choice: Choice) -> int | None:
    return choice.grid.bits if choice.grid else None


def _unseen(modules: list[str], method: str) -> str:
    more = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
    return f"{modules[0]}{more}: no inputs seen, rounded with {CALIBRATED[method].without}"


def _notices(choices: dict[str, Choice], checkpoint: Tensors) -> Iterator[str]:
    """One line for each reason, with the tensors it holds for."""
    reasons: dict[str, list[str]] = {}
    for name, choice in choices.items():
        if choice.why:
            kept = "kept dense, " if choice.grid is None else ""
            reasons.setdefault(kept + choice.why, []).append(names.module(name))
    dropped = [name for name in checkpoint.tensors if name not in choices]
    if dropped:
        reasons["left out, the head is tied to the embedding"] = dropped
    for reason, modules in reasons.items():
        more = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
        yield f"{modules[0]}{more}: {reason}"


def _values(row: Row) -> dict[str, float]:
    return {} if row.scheme == "kept" else {"relative_error": row.relative_error}


def _summary(folder: Path, rows: list[Row]) -> dict[str, Any]:
    worst = max(rows, key=lambda row: row.relative_error)
    return {
        "bits_per_weight": bits_per_weight(folder),
        "size_bytes": artifact.size(folder),
        "quantized": sum(row.scheme != "kept" for row in rows),
        "kept": sum(row.scheme == "kept" for row in rows),
        "worst": worst.name,
        "worst_relative_error": worst.relative_error,
    }


def _title(settings: Quantize) -> str:
    groups = f"groups of {settings.group_size}" if settings.group_size else "per channel"
    return f"quantize to {settings.goal}, {groups}, {settings.scheme}"
