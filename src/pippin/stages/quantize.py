"""Quantize a model, some rows of one tensor at a time, into MLX's affine layout.

Shape letters: O output features, I input features.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pippin import artifact
from pippin.errors import ModelError
from pippin.events import Event, Finished, Notice, Progress, Started
from pippin.job import Job
from pippin.model import names
from pippin.model.config import ModelConfig, read_config, write_raw
from pippin.model.quantized import bits_per_weight, dequantize, pack
from pippin.model.source import copy_side_files
from pippin.model.weights import Checkpoint, Writer, is_finite, row_chunks
from pippin.quantizers import Codes, Grid, Quantizer, load_quantizer
from pippin.quantizers.choices import Choice, choose_all, layout_specs, quantized_config
from pippin.recipe import Quantize

STAGE = "quantize"
REPORT = "quantize.json"
# Small enough for a processor's cache: twice as fast as chunks of 32 MB.
_CHUNK_BYTES = 2 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One tensor in the report. Errors compare the weights before and after: relative is
    ||W - W'|| / ||W||, max the largest of one weight."""

    name: str
    shape: tuple[int, ...]
    scheme: str
    bits: int
    group_size: int = 0
    relative_error: float = 0.0
    max_error: float = 0.0
    note: str = ""


@dataclass(slots=True)
class Error:
    """Sums over the rows of a tensor."""

    noise: float = 0.0
    signal: float = 0.0
    largest: float = 0.0

    def add(self, weight_OI: NDArray[np.float32], codes: Codes) -> None:
        """Count some rows."""
        away = dequantize(codes.codes_OI, codes.scales_OG, codes.biases_OG).reshape(-1)
        flat = weight_OI.reshape(-1)
        away -= flat
        self.noise += float(away @ away)
        self.signal += float(flat @ flat)
        self.largest = max(self.largest, float(away.max()), -float(away.min()))

    @property
    def relative(self) -> float:
        """||W - W'|| / ||W||."""
        return math.sqrt(self.noise / self.signal) if self.signal else 0.0


def quantize(job: Job) -> Iterator[Event]:
    """Write the quantized folder and `quantize.json`, a row a tensor.

    Raises ModelError for a model that is quantized already, and for weights that are not finite.
    """
    settings, source = job.recipe.quantize, job.inputs["model"]
    checkpoint, config = Checkpoint(source), read_config(source)
    refuse_quantized(source, config)
    choices = choose_all(checkpoint, config, settings)
    yield Started(stage=STAGE, title=_title(settings), total=len(choices), unit="tensors")
    for text in _notices(choices, checkpoint):
        yield Notice(stage=STAGE, text=text)
    summary: dict[str, Any] = {}
    with artifact.writing(job.folder, job.origin, summary) as folder:
        write_raw(folder, quantized_config(config, choices, settings))
        copy_side_files(source, folder)
        rows: list[Row] = []
        with Writer(folder, layout_specs(checkpoint, choices)) as writer:
            for row in _write_all(writer, checkpoint, choices, load_quantizer(settings.method)):
                rows.append(row)
                yield Progress(stage=STAGE, done=len(rows), values=_values(row))
        summary |= _summary(folder, rows)
        report = {**summary, "method": settings.method, "tensors": [asdict(row) for row in rows]}
        (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n")
    yield Finished(stage=STAGE, folder=str(job.folder), summary=summary)


def refuse_quantized(folder: Path, config: ModelConfig) -> None:
    """Raise ModelError for a model whose weights are codes already."""
    if config.quantization or config.raw.get("quantization_config"):
        raise ModelError(
            f"{folder} is quantized already", "start from the model it was quantized from"
        )


def _write_all(
    writer: Writer, checkpoint: Checkpoint, choices: dict[str, Choice], quantizer: Quantizer
) -> Iterator[Row]:
    for name, choice in choices.items():
        info = checkpoint.tensors[name]
        if choice.grid is None:
            _copy(writer, checkpoint, name)
            bits = 8 * info.dtype.itemsize
            yield Row(name=name, shape=info.shape, scheme="kept", bits=bits, note=choice.why)
            continue
        error = _write_codes(writer, checkpoint, name, choice.grid, quantizer)
        scheme = "symmetric" if choice.grid.symmetric else "affine"
        yield Row(
            name=name,
            shape=info.shape,
            scheme=scheme + (" per channel" if choice.grid.per_channel else ""),
            bits=choice.grid.bits,
            group_size=choice.grid.group_size,
            relative_error=error.relative,
            max_error=error.largest,
            note=choice.why,
        )


def _copy(writer: Writer, checkpoint: Checkpoint, name: str) -> None:
    info = checkpoint.tensors[name]
    if not info.shape:
        writer.write(name, checkpoint.read(name))
        return
    for start, stop in row_chunks(info, _CHUNK_BYTES):
        rows = checkpoint.read_rows(name, start, stop)
        _refuse_infinite(name, is_finite(rows))
        writer.write_rows(name, start, rows)


def _write_codes(
    writer: Writer, checkpoint: Checkpoint, name: str, grid: Grid, quantizer: Quantizer
) -> Error:
    info, module, error = checkpoint.tensors[name], names.module(name), Error()
    for start, stop in row_chunks(info, _CHUNK_BYTES):
        stored = checkpoint.read_rows(name, start, stop)
        _refuse_infinite(name, is_finite(stored))
        weight_OI = stored.astype(np.float32, copy=False)
        codes = quantizer.quantize(weight_OI, grid, info.dtype)
        if not (is_finite(codes.scales_OG) and is_finite(codes.biases_OG)):
            raise ModelError(
                f"{name}: a group's scale or bias does not fit {info.dtype.name}",
                f"quantize.keep = [{name!r}] leaves this tensor as it is",
            )
        error.add(weight_OI, codes)
        writer.write_rows(name, start, pack(codes.codes_OI, grid.bits))
        writer.write_rows(f"{module}.scales", start, codes.scales_OG)
        writer.write_rows(f"{module}.biases", start, codes.biases_OG)
    return error


def _refuse_infinite(name: str, finite: bool) -> None:
    if not finite:
        raise ModelError(
            f"{name} holds weights that are not finite", "the training diverged: train again"
        )


def _notices(choices: dict[str, Choice], checkpoint: Checkpoint) -> Iterator[str]:
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
    return f"quantize to {settings.bits} bits, {groups}, {settings.scheme}"
