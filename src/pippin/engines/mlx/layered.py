"""A network read one decoder layer at a time: weights come from the disk when it is their turn.

In memory are what stands outside of the layers, one layer with its moments, and the hidden states
that enter it. For a backward pass those of all layers lie in files.

Shape letters: B rows, T tokens, N real tokens, D hidden.
"""

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from pippin.data.batches import Batch
from pippin.engines.layered import ByLayer, Moments
from pippin.engines.mlx import parity
from pippin.engines.mlx.body import Loaded, body, plain_head
from pippin.engines.mlx.fisher import Drawn, Shifts, Weigher, keys_of, shifting
from pippin.engines.mlx.load import map_network
from pippin.engines.mlx.moments import HEAD, Collector, linears, watching
from pippin.engines.mlx.rows import Rows, padded_rows
from pippin.memory import LAYERED
from pippin.model import names
from pippin.model.config import read_raw
from pippin.model.weights import Tensors


@dataclass(kw_only=True)
class _Call:
    """A batch on its way: `asked` are each layer's other arguments, `state_BTD` its hidden states.

    On the way back that is the gradient by them.
    """

    rows: Rows
    asked: list[Any]
    state_BTD: mx.array

    def through(self, layer: Any, index: int, state_BTD: mx.array) -> mx.array:
        """What a layer makes of hidden states."""
        others, named = self.asked[index]
        return layer(state_BTD, *others, **named)


class LayeredModel(ByLayer):
    """What calibration asks of a model, in the memory of a layer."""

    def __init__(
        self, loaded: Loaded, weights: Tensors, scratch: Path, *, sequential: bool
    ) -> None:
        """`loaded` has layers that are not read yet; `scratch` is a folder for hidden states."""
        self._loaded, self._weights, self._scratch = loaded, weights, scratch
        layers: Any = loaded.network.layers
        self._layers: list[Any] = list(layers)
        first = next(n for n, m in loaded.network.named_modules() if m is layers[0])
        self._prefix = first.removesuffix(".0")
        super().__init__(len(self._layers), sequential=sequential)

    def through(self, index: int, calls: Sequence[_Call]) -> None:
        """As ByLayer's."""
        with self._read(index) as layer:
            for call in calls:
                call.state_BTD = call.through(layer, index, call.state_BTD)
                mx.eval(call.state_BTD)

    def observe(self, index: int, calls: Sequence[_Call], *, stay: bool) -> Moments:
        """As ByLayer's."""
        collector = Collector()
        with self._read(index) as layer, watching(self._linears(index), collector):
            for call in calls:
                collector.real_N = call.rows.real_N
                after_BTD = call.through(layer, index, call.state_BTD)
                mx.eval(after_BTD)
                call.state_BTD = call.state_BTD if stay else after_BTD
        return collector.moments()

    def observe_head(self, calls: Sequence[_Call]) -> Moments:
        """As ByLayer's."""
        collector = Collector()
        for call in calls:
            collector.real_N = call.rows.real_N
            collector.add(HEAD, self._norm(call.state_BTD))
        return collector.moments()

    def weigh_head(self, calls: Sequence[_Call], seed: int) -> Moments:
        """As ByLayer's."""
        weigher, head = Weigher(), self._loaded.head
        assert head is not None
        for call, key in zip(calls, keys_of(seed, len(calls)), strict=True):
            run = Drawn(head, call.rows, key)
            weigher.add_head(run, self._norm(call.state_BTD))
            call.state_BTD = mx.grad(partial(self._loss, run))(call.state_BTD)
            mx.eval(call.state_BTD)
        return weigher.moments()

    def weigh(self, index: int, calls: Sequence[_Call]) -> Moments:
        """As ByLayer's."""
        weigher = Weigher()
        with self._read(index) as layer, shifting(self._linears(index)) as shifts:
            for number, call in enumerate(calls):
                _go_back(call, (layer, index, self._kept(index, number)), shifts, weigher)
        return weigher.moments()

    def _loss(self, run: Drawn, state_BTD: mx.array) -> mx.array:
        return run.loss(self._norm(state_BTD))

    @property
    def _norm(self) -> Any:
        return body(self._loaded.network).norm

    def begin(self, batch: Batch) -> _Call:
        """Embedded tokens, and what the network hands to every layer: layers are left out."""
        self._loaded.refuse_long(int(batch.positions_BT.max()) + 1)
        rows, heard = padded_rows(batch), list[Any]()
        kinds = [type(layer) for layer in self._layers]
        try:
            for layer, kind in zip(self._layers, kinds, strict=True):
                layer.__class__ = _noting(kind, heard)
            body(self._loaded.network)(rows.tokens_BT)
        finally:
            for layer, kind in zip(self._layers, kinds, strict=True):
                layer.__class__ = kind
        assert len(heard) == len(self._layers)
        call = _Call(rows=rows, asked=[rest for _, *rest in heard], state_BTD=heard[0][0])
        heard.clear()  # or the classes would hold it for a while
        return call

    @contextlib.contextmanager
    def _read(self, index: int) -> Generator[Any]:
        """A layer with its weights, which leave memory afterwards."""
        layer = self._layers[index]
        unread: Any = tree_flatten(layer.parameters())
        where = f"{self._prefix}.{index}"
        read = [(n, _read(self._weights, f"{where}.{n}", like.dtype)) for n, like in unread]
        layer.load_weights(read)
        del read
        try:
            yield layer
        finally:
            layer.load_weights(unread)

    def _linears(self, index: int) -> dict[str, Any]:
        found = linears(self._layers[index])
        return {f"{self._prefix}.{index}.{name}": module for name, module in found}

    def _file(self, index: int, number: int) -> str:
        return str(self._scratch / f"states-{index}-{number}.safetensors")

    def keep(self, index: int, calls: Sequence[_Call]) -> None:
        """As ByLayer's."""
        self._scratch.mkdir(parents=True, exist_ok=True)
        for number, call in enumerate(calls):
            mx.save_safetensors(self._file(index, number), {"state": call.state_BTD})

    def _kept(self, index: int, number: int) -> mx.array:
        """What was kept; it is not needed again."""
        file = self._file(index, number)
        found: Any = mx.load(file)
        mx.eval(found)
        Path(file).unlink()
        return found["state"]


def _go_back(
    call: _Call, place: tuple[Any, int, mx.array], shifts: Shifts, weigher: Weigher
) -> None:
    """From the gradient by a layer's outputs to that by its inputs; linears are weighed."""
    layer, index, before_BTD = place
    after_BTD = call.state_BTD

    def pulled(
        state_BTD: mx.array, moved: dict[str, mx.array]
    ) -> tuple[mx.array, dict[str, mx.array]]:
        shifts.moved = moved
        made_BTD = call.through(layer, index, state_BTD)
        return (made_BTD * after_BTD).astype(mx.float32).sum(), dict(shifts.seen)

    pull = mx.value_and_grad(pulled, argnums=(0, 1))
    (_, inputs), (call.state_BTD, gradients) = pull(before_BTD, shifts.zeros(call.rows))
    mx.eval(inputs, call.state_BTD, gradients)
    for name, gradient in gradients.items():
        weigher.add(name, *(_real(call.rows, values) for values in (inputs[name], gradient)))


def _real(rows: Rows, values: mx.array) -> mx.array:
    return values.flatten(0, 1)[rows.real_N].astype(mx.float32)


def _noting(kind: Any, heard: list[Any]) -> type:
    class Noting(kind):
        def __call__(self, x: mx.array, *others: Any, **named: Any) -> mx.array:
            heard.append((x, others, named))
            return x

    return Noting


def _read(weights: Tensors, name: str, dtype: mx.Dtype) -> mx.array:
    return mx.array(weights.read(name).astype(np.float32)).astype(dtype)


def load_layered(
    weights: Tensors, dtype: mx.Dtype, scratch: Path, *, sequential: bool = False
) -> LayeredModel | None:
    """None where the network cannot be taken apart: another family, or other names of tensors.

    Raises ModelError for an architecture that mlx-lm computes differently than transformers.
    """
    raw = read_raw(weights.folder)
    if raw.get("model_type") not in LAYERED:
        return None
    longest = parity.check(weights.folder)
    network = map_network(weights.folder, dtype)
    own, stored = [name for name, _ in tree_flatten(network.parameters())], weights.tensors
    head = plain_head(network, raw)
    if not stored.keys() >= set(own) or (head.tied and names.HEAD in stored):
        return None  # an adapter may have parted the head from the embedding
    outside = [(n, _read(weights, n, dtype)) for n in own if names.layer(n) is None]
    network.load_weights(outside, strict=False)
    loaded = Loaded(network=network, head=head, longest=longest, notices=())
    return LayeredModel(loaded, weights, scratch, sequential=sequential)
