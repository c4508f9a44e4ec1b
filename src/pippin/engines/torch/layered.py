"""A network read one decoder layer at a time: weights come from the disk when it is their turn.

In memory are what stands outside of the layers, one layer with its moments, and the hidden states
that enter it. For a backward pass those of all layers lie in files.

Shape letters: B rows, T tokens, N real tokens, D hidden.
"""

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pippin.data.batches import Batch
from pippin.engines.layered import ByLayer, Moments
from pippin.engines.torch.body import body, plain_head
from pippin.engines.torch.fisher import Weigher, drawn_predictions
from pippin.engines.torch.load import empty_network, read_tensor
from pippin.engines.torch.loss import head_loss
from pippin.engines.torch.moments import Collector
from pippin.engines.torch.rows import Rows, padded_rows
from pippin.memory import LAYERED
from pippin.model import names
from pippin.model.weights import Tensors


@dataclass(kw_only=True)
class _Call:
    """A batch on its way: `asked` are each layer's other arguments, `state_BTD` its hidden states.

    On the way back that is the gradient by them.
    """

    rows: Rows
    asked: list[dict[str, Any]]
    state_BTD: Tensor


class LayeredModel(ByLayer):
    """What calibration asks of a model, in the memory of a layer."""

    def __init__(
        self, network: PreTrainedModel, weights: Tensors, scratch: Path, *, sequential: bool
    ) -> None:
        """`network` has its layers on the meta device; `scratch` is a folder for hidden states."""
        self._network, self._weights, self._scratch = network, weights, scratch
        self._layers: Any = body(network).layers
        self._prefix = next(n for n, m in network.named_modules() if m is self._layers)
        super().__init__(len(self._layers), sequential=sequential)

    @torch.no_grad()
    def through(self, index: int, calls: Sequence[_Call]) -> None:
        """As ByLayer's."""
        with self._loaded(index) as layer:
            for call in calls:
                call.state_BTD = layer(call.state_BTD, **call.asked[index])

    @torch.no_grad()
    def observe(self, index: int, calls: Sequence[_Call], *, stay: bool) -> Moments:
        """As ByLayer's."""
        collector = Collector()
        with self._loaded(index) as layer, _hooked(self._linears(index), collector, before=True):
            for call in calls:
                collector.real_N = call.rows.real_N
                after_BTD = layer(call.state_BTD, **call.asked[index])
                call.state_BTD = call.state_BTD if stay else after_BTD
        return collector.moments()

    @torch.no_grad()
    def observe_head(self, calls: Sequence[_Call]) -> Moments:
        """As ByLayer's."""
        collector = Collector()
        for call in calls:
            collector.real_N = call.rows.real_N
            collector.add(names.module(names.HEAD), self._norm(call.state_BTD))
        return collector.moments()

    def weigh_head(self, calls: Sequence[_Call], seed: int) -> Moments:
        """As ByLayer's."""
        weigher, head = Weigher(), plain_head(self._network)
        assert head is not None
        draw = torch.Generator(self._network.device).manual_seed(seed)
        for call in calls:
            weigher.real_N = call.rows.real_N
            state_BTD = call.state_BTD.detach().requires_grad_(True)
            with torch.enable_grad():
                hidden_ND = weigher.real(self._norm(state_BTD))
                targets_N, weight_N = drawn_predictions(hidden_ND.detach(), head, draw)
                head_loss(hidden_ND, targets_N, head).backward()
            weigher.add(names.module(names.HEAD), hidden_ND.detach().float(), weight_N)
            assert state_BTD.grad is not None
            call.state_BTD = state_BTD.grad
        return weigher.moments()

    def weigh(self, index: int, calls: Sequence[_Call]) -> Moments:
        """As ByLayer's."""
        weigher = Weigher()
        with self._loaded(index) as layer, _hooked(self._linears(index), weigher, before=False):
            for number, call in enumerate(calls):
                weigher.real_N = call.rows.real_N
                state_BTD = self._kept(index, number, call.state_BTD).requires_grad_(True)
                with torch.enable_grad():
                    layer(state_BTD, **call.asked[index]).backward(call.state_BTD)
                assert state_BTD.grad is not None
                call.state_BTD = state_BTD.grad
        return weigher.moments()

    @property
    def _norm(self) -> nn.Module:
        norm: Any = body(self._network).norm
        return norm

    @torch.no_grad()
    def begin(self, batch: Batch) -> _Call:
        """Embedded tokens, and what the network hands to every layer: layers are left out."""
        asked: list[dict[str, Any]] = []

        def note(state_BTD: Tensor, **others: Any) -> Tensor:
            asked.append(others)
            return state_BTD

        rows, first = padded_rows(batch, self._network.device), []
        for layer in self._layers:
            layer.forward = note
        hook = self._layers[0].register_forward_hook(lambda m, x, y: first.append(y))
        try:
            body(self._network)(input_ids=rows.tokens_BT, use_cache=False)
        finally:
            hook.remove()
            for layer in self._layers:
                del layer.forward
        assert len(asked) == len(self._layers)
        return _Call(rows=rows, asked=asked, state_BTD=first[0])

    @contextlib.contextmanager
    def _loaded(self, index: int) -> Generator[nn.Module]:
        """A layer with its weights, which leave memory afterwards."""
        layer, device = self._layers[index], self._network.device
        dtype = self._network.dtype
        state = {
            name: read_tensor(self._weights, f"{self._prefix}.{index}.{name}").to(device, dtype)
            for name in layer.state_dict()
        }
        layer.load_state_dict(state, assign=True)
        layer.requires_grad_(False)
        del state
        try:
            yield layer
        finally:
            layer.to("meta")

    def _linears(self, index: int) -> dict[str, nn.Module]:
        where = f"{self._prefix}.{index}"
        modules = self._layers[index].named_modules()
        return {f"{where}.{name}": m for name, m in modules if isinstance(m, nn.Linear)}

    def _file(self, index: int, number: int) -> Path:
        return self._scratch / f"states-{index}-{number}.npy"

    def keep(self, index: int, calls: Sequence[_Call]) -> None:
        """As ByLayer's."""
        self._scratch.mkdir(parents=True, exist_ok=True)
        for number, call in enumerate(calls):
            # numpy does not know bfloat16; the bytes are the same.
            state = call.state_BTD.cpu().contiguous().view(torch.uint8)
            np.save(self._file(index, number), state.numpy())

    def _kept(self, index: int, number: int, like_BTD: Tensor) -> Tensor:
        """What was kept; it is not needed again."""
        file = self._file(index, number)
        stored = torch.from_numpy(np.load(file))
        file.unlink()
        return stored.view(like_BTD.dtype).to(like_BTD.device)


@contextlib.contextmanager
def _hooked(
    linears: dict[str, nn.Module], collector: Collector | Weigher, *, before: bool
) -> Generator[None]:
    """Inside, the collector sees what enters the linears, or what leaves them."""
    handles = [
        m.register_forward_pre_hook(collector.hook(name))
        if before
        else m.register_forward_hook(collector.hook(name))
        for name, m in linears.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def load_layered(
    weights: Tensors,
    dtype: torch.dtype,
    device: torch.device,
    scratch: Path,
    *,
    sequential: bool = False,
) -> LayeredModel | None:
    """None where the network cannot be taken apart: another family, or other names of tensors."""
    network = empty_network(weights.folder, dtype)
    if network is None or network.config.get_text_config().model_type not in LAYERED:
        return None
    own, stored = dict(network.named_parameters()), weights.tensors
    tied = bool(network.config.tie_word_embeddings)
    if not own.keys() <= stored.keys() | ({names.HEAD} if tied else set()):
        return None
    if tied and names.HEAD in stored:
        return None  # an adapter may have parted the two
    for name, parameter in own.items():
        if names.layer(name) is None:
            parameter.data = read_tensor(weights, name).to(device, dtype)
    network.tie_weights()
    for module in (m for n, m in network.named_modules() if names.layer(f"{n}.") is None):
        for key, buffer in module.named_buffers(recurse=False):
            setattr(module, key, buffer.to(device))
    network.eval().requires_grad_(False)
    return LayeredModel(network, weights, scratch, sequential=sequential)
