"""Quantize a model, some rows of one tensor at a time, into MLX's affine layout."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from pippin import artifact
from pippin.engines.host import steady_heap
from pippin.events import Event, Finished, Notice, Progress, Started
from pippin.figures import counted
from pippin.job import Job
from pippin.model import names
from pippin.model.config import write_raw
from pippin.model.quantized import bits_per_weight
from pippin.model.source import copy_side_files
from pippin.model.weights import Tensors, Writer
from pippin.quantizers import CALIBRATED, kernels
from pippin.quantizers.choices import Choice, choose_all, layout_specs, quantized_config
from pippin.recipe import Quantize
from pippin.stages.checkpoints import work_folder
from pippin.stages.coding import Coder, Row
from pippin.stages.layers_done import LayersDone
from pippin.stages.quantize_work import Work, open_source, settle
from pippin.stages.recovery import recover, recovery_text

STAGE = "quantize"
REPORT = "quantize.json"


def quantize(job: Job) -> Iterator[Event]:
    """Write the quantized folder and `quantize.json`, a row a tensor.

    With an adapter among the inputs its update is in the weights, merged as they are read. Raises
    ModelError for a model that is quantized already, and for weights that are not finite.
    """
    began = time.monotonic()
    steady_heap()
    settings, source = job.recipe.quantize, open_source(job)
    choices = choose_all(source.tensors, source.config, settings)
    yield Started(stage=STAGE, title=_title(settings), total=len(choices), unit="tensors")
    yield from _told(*source.notices, *_notices(choices, source.tensors))
    if kernels.missing():
        yield from _told(f"weights are rounded in numpy, which is slower: {kernels.missing()}")
    work = settle(job, source, choices)
    yield from _told(*work.notices)
    rows, summary = list[Row](), dict[str, Any]()
    done = LayersDone(folder=work_folder(job.folder), origin=job.origin)
    with artifact.writing(job.folder, job.origin, summary) as folder:
        write_raw(folder, quantized_config(source.config, work.choices, settings))
        copy_side_files(job.inputs["model"], folder)
        with Writer(folder, layout_specs(source.tensors, work.choices)) as writer:
            coder = Coder(
                checkpoint=source.tensors,
                writer=writer,
                method=settings.method,
                folding=work.folding,
            )
            for made in _write_all(coder, work, done):
                if isinstance(made, Notice):
                    yield made
                else:
                    rows.append(made)
                    yield Progress(stage=STAGE, done=len(rows), values=_values(made))
        rows.sort(key=lambda row: names.natural(row.name))
        summary |= {**_summary(folder, rows), **work.summary}
        if work.calibration and work.updates:
            summary["recovered"] = recover(
                work.calibration, work.updates, settings.recover_passes, folder
            )
            yield from _told(recovery_text(summary["recovered"]))
        summary["seconds"] = round(time.monotonic() - began, 2)
        report = {**summary, "method": settings.method, "tensors": [asdict(row) for row in rows]}
        (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n")
    done.forget()
    yield Finished(stage=STAGE, folder=str(job.folder), summary=summary)


def _told(*texts: str) -> Iterator[Notice]:
    return (Notice(stage=STAGE, text=text) for text in texts)


def _write_all(coder: Coder, work: Work, done: LayersDone) -> Iterator[Row | Notice]:
    """Every tensor; those without a Hessian first, the others layer by layer."""
    asked = {name for part in work.parts for name in part}
    for name, choice in work.choices.items():
        if name not in asked:
            yield coder.write(name, choice, None)
    found = [n for n, (row, _) in done.found.items() if row.bits == _bits(work.choices[n])]
    if work.revised:
        found = []  # what later layers read comes out of finished ones: all are gone through
    if found:
        yield from _told(f"{counted(len(found), 'tensor')} finished before")
    for part in work.parts:
        left = {name: linear for name, linear in part.items() if name not in found}
        for name in [name for name in part if name not in left]:
            yield done.restore(name, coder)
        if left:
            yield from _calibrated(coder, left, work, done)


def _calibrated(
    coder: Coder, part: dict[str, str], work: Work, done: LayersDone
) -> Iterator[Row | Notice]:
    """The tensors of a part; every finished layer is kept."""
    assert work.calibration is not None
    unseen = [names.module(name) for name in work.calibration.unseen(part)]
    if unseen:
        yield from _told(_unseen(unseen, coder.method))
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
    return f"quantize to {settings.goal} by {settings.method}, {groups}, {settings.scheme}"
