"""One tensor becomes codes, some rows at a time, and a row in the report.

Shape letters: O output features, I input features.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pippin.engines.host import cores
from pippin.errors import ModelError
from pippin.model import names
from pippin.model.quantized import dequantize, pack, unpack
from pippin.model.weights import Tensors, Writer, is_finite, row_chunks
from pippin.quantizers import CALIBRATED, Codes, Grid, Quantizer, kernels, load_quantizer
from pippin.quantizers.awq import Folding
from pippin.quantizers.choices import Choice
from pippin.quantizers.hessian import Hessian
from pippin.quantizers.in_turn import InTurn, spans

# Small enough for a processor's cache, and for blocks that the heap keeps instead of giving them
# back, see steady_heap; large enough that threads seldom wait for the interpreter.
_CHUNK_BYTES = 3 << 20
# Numpy and kernels let go of the interpreter. More threads would wait for memory; one more than
# cores, as one waits for the disk.
_MOST_THREADS = 8
# Rounding under a Hessian goes through all inputs for every chunk: fewer, larger ones.
_CALIBRATED_CHUNK_BYTES = 32 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One tensor in the report. Errors compare the weights before and after: relative is
    ||W - W'|| / ||W||, max the largest of one weight. Where the inputs X were seen, output is
    ||X (W - W')^T|| / ||X W^T||, and output_error_rtn the same of plain rounding on this grid."""

    name: str
    shape: tuple[int, ...]
    scheme: str
    bits: int
    method: str = ""
    group_size: int = 0
    relative_error: float = 0.0
    max_error: float = 0.0
    output_error: float | None = None
    output_error_rtn: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Error:
    """Sums over rows of a tensor; those of the outputs where a Hessian was seen."""

    noise: float = 0.0
    signal: float = 0.0
    largest: float = 0.0
    outputs: float = 0.0
    moved: float = 0.0
    moved_rtn: float = 0.0

    @classmethod
    def of(cls, weight_OI: NDArray[Any], codes: Codes) -> "Error":
        """Of some rows, in any dtype."""
        groups_OGS = weight_OI.reshape(*codes.scales_OG.shape, -1)
        if kernels.fit(groups_OGS):
            scales_OG, biases_OG = (
                part.astype(np.float32) for part in (codes.scales_OG, codes.biases_OG)
            )
            return cls(*kernels.errors(groups_OGS, codes.codes_OI, (scales_OG, biases_OG)))
        weight_OI = weight_OI.astype(np.float32, copy=False)
        away_OI = _away(weight_OI, codes)
        away, flat = away_OI.reshape(-1), weight_OI.reshape(-1)
        largest = max(float(away.max()), -float(away.min()))
        return cls(float(away @ away), float(flat @ flat), largest)

    def seen(
        self, weight_OI: NDArray[np.float32], codes: Codes, plain: Codes, hessian: Hessian
    ) -> "Error":
        """With what becomes of the outputs, `plain` being what plain rounding leaves."""
        return replace(
            self,
            outputs=hessian.output_error(weight_OI),
            moved=hessian.output_error(_away(weight_OI, codes)),
            moved_rtn=hessian.output_error(_away(weight_OI, plain)),
        )

    def __add__(self, other: "Error") -> "Error":
        """Of the rows of both."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return replace(Error(**sums), largest=max(self.largest, other.largest))

    @property
    def relative(self) -> float:
        """||W - W'|| / ||W||."""
        return _ratio(self.noise, self.signal)

    @property
    def output(self) -> float:
        """||X (W - W')^T|| / ||X W^T||."""
        return _ratio(self.moved, self.outputs)

    @property
    def output_rtn(self) -> float:
        """The same for plain rounding."""
        return _ratio(self.moved_rtn, self.outputs)


def _away(weight_OI: NDArray[np.float32], codes: Codes) -> NDArray[np.float32]:
    away_OI = dequantize(codes.codes_OI, codes.scales_OG, codes.biases_OG)
    away_OI -= weight_OI
    return away_OI


def _ratio(noise: float, signal: float) -> float:
    return math.sqrt(max(noise, 0.0) / signal) if signal > 0 else 0.0


@dataclass(kw_only=True)
class Coder:
    """Writes every tensor of a checkpoint as its choice says, by one method.

    `parts` are what was written of the last tensor, in chunks, where it was calibrated.
    """

    checkpoint: Tensors
    writer: Writer
    method: str
    folding: Folding = field(default_factory=Folding)
    quantizers: dict[str, Quantizer] = field(default_factory=dict)
    parts: dict[str, list[NDArray[Any]]] = field(default_factory=dict)

    def write(self, name: str, choice: Choice, hessian: Hessian | None) -> Row:
        """Copy or quantize one tensor. Raises ModelError for weights that are not finite."""
        info = self.checkpoint.tensors[name]
        if choice.grid is None:
            self._copy(name)
            bits = 8 * info.dtype.itemsize
            return Row(name=name, shape=info.shape, scheme="kept", bits=bits, note=choice.why)
        method = self.method
        if method in CALIBRATED and hessian is None:
            method = CALIBRATED[method].without
        if hessian is not None and name in self.folding.inputs:
            hessian = hessian.of_inputs_over(self.folding.inputs[name])
        error = self._write_codes(name, choice.grid, method, hessian)
        scheme = "symmetric" if choice.grid.symmetric else "affine"
        scheme = "k" if choice.grid.nested else scheme
        return Row(
            name=name,
            shape=info.shape,
            scheme=scheme + (" per channel" if choice.grid.per_channel else ""),
            bits=choice.grid.bits,
            method=method,
            group_size=choice.grid.group_size,
            relative_error=error.relative,
            max_error=error.largest,
            output_error=error.output if hessian else None,
            output_error_rtn=error.output_rtn if hessian else None,
            note=choice.why,
        )

    def dense(self, row: Row) -> NDArray[np.float32]:
        """What was written of the last tensor, as it is read."""
        module = names.module(row.name)
        packed, scales, biases = (
            np.concatenate(self.parts[part])
            for part in (row.name, f"{module}.scales", f"{module}.biases")
        )
        return dequantize(unpack(packed, row.bits, row.shape[1]), scales, biases)

    def _copy(self, name: str) -> None:
        info = self.checkpoint.tensors[name]
        if not info.shape:
            self.writer.write(name, self.checkpoint.read(name))
            return
        for start, stop in row_chunks(info, _CHUNK_BYTES):
            rows = self.checkpoint.read_rows(name, start, stop)
            refuse_infinite(name, is_finite(rows))
            folded = self.folding.apply(name, start, rows)
            self.writer.write_rows(name, start, folded.astype(rows.dtype, copy=False))

    def _write_codes(self, name: str, grid: Grid, method: str, hessian: Hessian | None) -> Error:
        """All rows of a tensor, in chunks: at once without a Hessian, which uses all cores."""
        info = self.checkpoint.tensors[name]
        chunk = partial(self._write_chunk, name, grid, self._quantizer(method), hessian)
        self.parts = {}
        if hessian and hessian.outputs_OS is not None:
            return sum((chunk((span.start, span.stop)) for span in spans(info.shape[0])), Error())
        if hessian:
            chunks = list(row_chunks(info, _CALIBRATED_CHUNK_BYTES))
            return sum((chunk(rows) for rows in chunks), Error())
        with ThreadPoolExecutor(min(_MOST_THREADS, cores() + 1)) as threads:
            done = threads.map(chunk, row_chunks(info, _CHUNK_BYTES))
            return sum(done, Error())

    def _write_chunk(
        self,
        name: str,
        grid: Grid,
        quantizer: Quantizer,
        hessian: Hessian | None,
        rows: tuple[int, int],
    ) -> Error:
        stored, module = self.checkpoint.read_rows(name, *rows), names.module(name)
        refuse_infinite(name, is_finite(stored))
        weight_OI = self.folding.apply(name, rows[0], stored)
        if hessian:
            weight_OI = weight_OI.astype(np.float32, copy=False)
        if hessian and hessian.outputs_OS is not None:
            quantizer = InTurn(quantizer, hessian.outputs_OS[slice(*rows), : len(stored)])
        codes = quantizer.quantize(weight_OI, grid, stored.dtype, hessian)
        _refuse_overflow(name, codes)
        packed = {name: pack(codes.codes_OI, grid.bits)}
        packed |= {f"{module}.scales": codes.scales_OG, f"{module}.biases": codes.biases_OG}
        for part, array in packed.items():
            self.writer.write_rows(part, rows[0], array)
            if hessian:
                self.parts.setdefault(part, []).append(array)
        error = Error.of(weight_OI, codes)
        if hessian is None:
            return error
        plain = self._quantizer("rtn").quantize(weight_OI, grid, stored.dtype)
        return error.seen(weight_OI, codes, plain, hessian)

    def _quantizer(self, method: str) -> Quantizer:
        if method not in self.quantizers:
            self.quantizers[method] = load_quantizer(method)
        return self.quantizers[method]


def refuse_infinite(name: str, finite: bool) -> None:
    """Raise ModelError for a tensor that is not finite."""
    if not finite:
        raise ModelError(
            f"{name} holds weights that are not finite", "the training diverged: train again"
        )


def _refuse_overflow(name: str, codes: Codes) -> None:
    if not (is_finite(codes.scales_OG) and is_finite(codes.biases_OG)):
        raise ModelError(
            f"{name}: a group's scale or bias does not fit {codes.scales_OG.dtype.name}",
            f"quantize.keep = [{name!r}] leaves this tensor as it is",
        )
