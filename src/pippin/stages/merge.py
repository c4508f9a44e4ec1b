"""Merge an adapter into the weights it was trained on, one tensor at a time.

Shape letters: I input features, O output features, R rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pippin import artifact
from pippin.errors import ModelError
from pippin.events import Event, Finished, Notice, Progress, Started
from pippin.job import Job
from pippin.model import names
from pippin.model.adapter import Adapter, load_adapter
from pippin.model.config import parse_config, untied, with_dtype, without_quantization, write_raw
from pippin.model.quantized import DenseView
from pippin.model.source import copy_side_files
from pippin.model.weights import Spec, Writer, is_finite, row_chunks
from pippin.stages.belonging import check_base, embedding_of

STAGE = "merge"
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """What is added to a tensor, as stored: scale * left @ right; left has the tensor's rows.

    In DoRA the sum's norms over inputs, which lie along axis `inputs`, become `magnitude_O`.
    """

    left: NDArray[np.float32]
    right: NDArray[np.float32]
    scale: float
    inputs: int = 1
    magnitude_O: NDArray[np.float32] | None = None

    def add(self, rows: NDArray[Any], start: int, stop: int) -> NDArray[np.float32]:
        """Rows of the tensor with their update, float32."""
        update = self.left[start:stop] @ self.right
        update *= self.scale
        update += rows.astype(np.float32)
        return update


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Every tensor of the merged model: what it is made from, and what is added to it."""

    specs: dict[str, Spec]
    sources: dict[str, str]
    deltas: dict[str, Delta]
    config: dict[str, Any]
    notices: tuple[str, ...]


class Merged:
    """A model folder seen with an adapter's update in its weights, read some rows at a time.

    Sums in float32 and casts once. Raises ModelError where the adapter was trained on another
    base, and while it is read where a sum is not finite. `notices` say what changes beside the
    weights.
    """

    def __init__(self, job: Job) -> None:
        """Of the folders `model` and `adapter` among the job's inputs."""
        self.folder = job.inputs["model"]
        adapter = load_adapter(job.inputs["adapter"])
        self.base = DenseView(self.folder)
        self.plan = plan_merge(self.base, adapter)
        self.tensors = self.plan.specs
        self.config = parse_config(self.plan.config, self.folder)
        checked = check_base(
            adapter, self.folder, job.origin.inputs["model"], job.inputs.get("trained_on")
        )
        self.notices = (*checked, *self.plan.notices)
        self._gain: tuple[str, NDArray[np.float32]] | None = None
        self._lock = Lock()

    def read(self, name: str) -> NDArray[Any]:
        """A whole tensor in its own dtype."""
        shape = self.tensors[name].shape
        return self.read_rows(name, 0, shape[0]) if shape else self.base.read(name)

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Rows of a tensor, likewise."""
        spec, delta = self.tensors[name], self.plan.deltas.get(name)
        rows = self.base.read_rows(self.plan.sources[name], start, stop)
        if delta is not None:
            rows = delta.add(rows, start, stop)
            if delta.magnitude_O is not None:
                gain = self._gain_of(name, delta)
                rows *= gain[start:stop] if len(gain) > 1 else gain
        if rows.dtype != spec.dtype:
            with np.errstate(over="ignore"):
                rows = rows.astype(spec.dtype)
        if not is_finite(rows):
            raise ModelError(
                f"{name} is not finite after the merge",
                f"it does not fit {spec.dtype.name}, or the training diverged: train again with "
                "a smaller learning rate",
            )
        return rows

    def _gain_of(self, name: str, delta: Delta) -> NDArray[np.float32]:
        """DoRA's factors of the tensor that was asked for last, found once for all threads."""
        with self._lock:
            if self._gain is None or self._gain[0] != name:
                self._gain = (name, _gain(self.base, self.plan.sources[name], delta))
            return self._gain[1]


def merge(job: Job) -> Iterator[Event]:
    """Write the model with the adapter's update in its weights.

    Memory: the adapter, and some rows of one tensor. Raises what `Merged` raises.
    """
    merged = Merged(job)
    total = len(merged.tensors)
    yield Started(stage=STAGE, title="merge the adapter", total=total, unit="tensors")
    for text in merged.notices:
        yield Notice(stage=STAGE, text=text)
    summary: dict[str, Any] = {"tensors": total, "merged": len(merged.plan.deltas)}
    with artifact.writing(job.folder, job.origin, summary) as folder:
        write_raw(folder, merged.config.raw)
        copy_side_files(merged.folder, folder)
        with Writer(folder, merged.tensors) as writer:
            for done, name in enumerate(merged.tensors, 1):
                _write_tensor(writer, merged, name)
                yield Progress(stage=STAGE, done=done, values={})
        summary["size_bytes"] = artifact.size(folder)
    yield Finished(stage=STAGE, folder=str(job.folder), summary=summary)


def plan_merge(base: DenseView, adapter: Adapter) -> Plan:
    """Pair every update with its tensor. Raises ModelError for one that fits none."""
    specs, sources = dict(base.tensors), {name: name for name in base.tensors}
    config, notices = base.config.raw, []
    if base.config.quantization:
        config = without_quantization(config)
        notices.append("the base is quantized: the merged model is dense")
    if base.config.tied_embeddings and _touches_tied_pair(adapter):
        embedding = embedding_of(base)
        specs[names.HEAD], sources[names.HEAD] = specs[embedding], embedding
        config = untied(config)
        notices.append("the adapter changes one of a tied pair: embedding and head are now two")
    deltas = {}
    for linear in adapter.linears:
        name = _find(linear, specs, adapter)
        deltas[name] = _delta(linear, specs[name], adapter, base.config.model_type)
    return Plan(
        specs=specs,
        sources=sources,
        deltas=deltas,
        config=with_dtype(config, _main_dtype(specs)),
        notices=tuple(notices),
    )


def _touches_tied_pair(adapter: Adapter) -> bool:
    return any(names.is_embedding(name) or names.is_head(name) for name in adapter.linears)


def _find(linear: str, specs: dict[str, Spec], adapter: Adapter) -> str:
    """The tensor of an adapted module; a checkpoint may leave out the name of the whole model."""
    name = f"{linear}.weight"
    if name in specs:
        return name
    alike = [n for n in specs if name.endswith(f".{n}") or n.endswith(f".{name}")]
    if len(alike) != 1:
        raise ModelError(
            f"the adapter changes {linear}, which the base does not have", _hint(adapter)
        )
    return alike[0]


def _delta(linear: str, spec: Spec, adapter: Adapter, model_type: str) -> Delta:
    a_RI = adapter.weights[f"{linear}.lora_A.weight"]
    b_OR = adapter.weights[f"{linear}.lora_B.weight"]
    transposed = names.is_transposed(model_type, linear)
    if adapter.raw.get("fan_in_fan_out") and not transposed and linear not in adapter.embeddings:
        raise ModelError(
            f"the adapter says fan_in_fan_out, and pippin does not know how {model_type} "
            f"stores {linear}",
            "merge it with peft and start from the merged model",
        )
    shape = (b_OR.shape[0], a_RI.shape[1])
    _check_shape(linear, shape, spec.shape[::-1] if transposed else spec.shape, adapter)
    left, right = (a_RI.T, b_OR.T) if transposed else (b_OR, a_RI)
    return Delta(
        left=left,
        right=right,
        scale=adapter.scale_of(linear),
        inputs=0 if transposed else 1,
        magnitude_O=adapter.weights.get(f"{linear}.{names.MAGNITUDE}"),
    )


def _check_shape(
    linear: str, asked: tuple[int, ...], found: tuple[int, ...], adapter: Adapter
) -> None:
    if asked == found:
        return
    axis = 1 if len(found) != 2 or asked[1] != found[1] else 0
    kind = ("outputs", "width")[axis]
    has = found[axis] if len(found) == 2 else f"shape {found}"
    raise ModelError(
        f"adapter rank {adapter.rank} needs {names.last(linear)} of {kind} {asked[axis]}, "
        f"the base has {has}",
        _hint(adapter),
    )


def _hint(adapter: Adapter) -> str:
    named = f" (it names {adapter.base.name})" if adapter.base else ""
    return f"this adapter was trained on another base{named}"


def _main_dtype(specs: dict[str, Spec]) -> str:
    """The dtype that most of the weights have."""
    held: dict[str, int] = {}
    for spec in specs.values():
        held[spec.dtype.name] = held.get(spec.dtype.name, 0) + int(np.prod(spec.shape))
    return max(held, key=lambda name: held[name])


def _gain(base: DenseView, source: str, delta: Delta) -> NDArray[np.float32]:
    """DoRA's factors, to be multiplied with the tensor: (O, 1), or (1, O) for transposed ones."""
    squares = []
    for start, stop in row_chunks(base.tensors[source], _CHUNK_BYTES):
        rows = delta.add(base.read_rows(source, start, stop), start, stop)
        squares.append(np.square(rows).sum(delta.inputs, keepdims=True))
    whole = np.concatenate(squares) if delta.inputs else np.sum(squares, axis=0)
    norms = np.sqrt(np.maximum(whole, np.finfo(np.float32).tiny))
    assert delta.magnitude_O is not None
    return delta.magnitude_O.reshape(norms.shape) / norms


def _write_tensor(writer: Writer, merged: Merged, name: str) -> None:
    spec = merged.tensors[name]
    if not spec.shape:
        writer.write(name, merged.read(name))
        return
    for start, stop in row_chunks(spec, _CHUNK_BYTES):
        writer.write_rows(name, start, merged.read_rows(name, start, stop))
