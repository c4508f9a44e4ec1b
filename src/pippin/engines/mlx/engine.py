"""MLX on one device: loading a checkpoint, and what a loaded checkpoint can be asked.

Shape letters: B rows, T tokens, K kept tokens of a distribution.
"""

import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from numpy.typing import NDArray

from pippin.data.batches import Batch
from pippin.engines import Sampling, Tokens, TopK, Weights
from pippin.engines.coded import refuse_dense
from pippin.engines.mlx import device as devices
from pippin.engines.mlx import parity
from pippin.engines.mlx.blas import notice
from pippin.engines.mlx.body import Loaded, find_head
from pippin.engines.mlx.coded import CodesTrainer, take_codes
from pippin.engines.mlx.fisher import loss_moments
from pippin.engines.mlx.following import follow
from pippin.engines.mlx.generate import (
    Decoding,
    decodes_together,
    generate,
    quantized_decoding,
)
from pippin.engines.mlx.layered import LayeredModel, load_layered
from pippin.engines.mlx.load import load_network, map_network
from pippin.engines.mlx.lora import add_adapter
from pippin.engines.mlx.moments import input_moments
from pippin.engines.mlx.names import full_places, lora_places
from pippin.engines.mlx.probe import find_ability
from pippin.engines.mlx.recovery import Parent, Recovery, real_states
from pippin.engines.mlx.ring import find_ring
from pippin.engines.mlx.rows import Rows
from pippin.engines.mlx.score import logprobs, topk
from pippin.engines.mlx.trainer import MlxTrainer
from pippin.engines.recovery import Recovered, Tune, recover, refuse_no_head
from pippin.errors import ModelError
from pippin.model.config import read_raw
from pippin.model.quantized import DenseView
from pippin.model.weights import Tensors
from pippin.recipe import Lora, Train


class MlxEngine:
    """MLX on one device."""

    def __init__(self, device: str, remote_code: bool = False) -> None:
        self._device = device
        self._remote_code = remote_code

    def load(self, checkpoint: Path, dtype: str, adapter: Path | None = None) -> "MlxModel":
        """A Hugging Face folder, plain or quantized in our layout, with an optional PEFT folder.

        `dtype` auto is bfloat16 on a GPU, else float32. Quantized tensors stay quantized on a GPU.
        Raises ModelError for a folder that cannot be loaded, an architecture that mlx-lm computes
        differently than transformers, or an adapter of another base.
        """
        picked = devices.pick_dtype(dtype, self._device)
        longest = parity.check(checkpoint)
        network = load_network(checkpoint, picked, self._remote_code)
        if adapter is not None:
            _add_saved_adapter(network, adapter)
        slow = notice() if self._device == "cpu" else None
        told = [text for text in (slow, parity.notice(checkpoint)) if text]
        loaded = Loaded(
            network=network,
            head=find_head(network, read_raw(checkpoint)),
            longest=longest,
            notices=tuple(told),
        )
        return MlxModel(loaded, checkpoint, devices.dtype_name(picked))

    def load_layers(
        self, weights: Tensors, dtype: str, scratch: Path, *, sequential: bool = False
    ) -> LayeredModel | None:
        """A model read one decoder layer at a time; hidden states go to files in `scratch`.

        `sequential`: a layer's weights are read again before the inputs of the next one are found.
        None where it cannot be taken apart.
        """
        picked = devices.pick_dtype(dtype, self._device)
        return load_layered(weights, picked, scratch, sequential=sequential)

    def lead(self) -> None:
        """Find the processes that were launched with this one; it is the first of them."""
        find_ring()

    def let_go(self, fault: str) -> None:
        """Tell the others that the run is over, and why where it failed."""
        if ring := find_ring():
            ring.let_go(fault)

    def follow(self) -> str:
        """In any but the first: take a share of its updates until its run is over.

        Returns why that failed, or nothing. Raises PippinError where this process cannot go on.
        """
        ring = find_ring()
        return follow(self, ring) if ring else ""

    def device(self) -> str:
        """The device in words, e.g. `cpu (2 cores)`."""
        return devices.describe(self._device)

    def dtype(self, name: str) -> str:
        """The dtype that a recipe's name stands for on this device: what `auto` picks."""
        return devices.dtype_name(devices.pick_dtype(name, self._device))

    def peak_memory(self) -> int:
        """Bytes: the GPU allocator's peak, or the process's peak resident set."""
        return devices.peak_memory(self._device)


class MlxModel:
    """A loaded checkpoint."""

    def __init__(self, loaded: Loaded, checkpoint: Path, dtype: str) -> None:
        self.loaded, self.network = loaded, loaded.network
        self.checkpoint, self.dtype = checkpoint, dtype

    def logprobs(self, tokens_BT: Tokens) -> NDArray[np.float32]:
        """log p(token t+1 | tokens up to t), (B, T-1). Rows are padded on the right."""
        self.loaded.refuse_long(tokens_BT.shape[1])
        return logprobs(self.network, self.loaded.head, tokens_BT)

    def topk(self, tokens_BT: Tokens, k: int, ids_BTK: NDArray[np.int32] | None = None) -> TopK:
        """The k likeliest next tokens at every position, then the given ids, in one pass."""
        self.loaded.refuse_long(tokens_BT.shape[1])
        return topk(self.network, self.loaded.head, tokens_BT, k, ids_BTK)

    def generate(self, prompts: Sequence[Tokens], sampling: Sampling) -> Iterator[list[int | None]]:
        """Each step's token of every prompt; None for a row that has ended."""
        self.loaded.refuse_long(max(map(len, prompts), default=0) + sampling.max_tokens)
        return generate(self.loaded, prompts, sampling, how=self._decoding)

    def quantize_cache(self, bits: int) -> None:
        """From now on `generate` keeps keys and values in so many bits, a prompt after the other.

        Raises ModelError where mlx-lm does not have it for this model.
        """
        self._decoding = quantized_decoding(self.loaded, bits)

    def input_moments(
        self, batches: Sequence[Batch], names: Collection[str] | None = None
    ) -> dict[str, NDArray[np.float32]]:
        """X^T X of every linear's inputs over the batches' real tokens, (D, D) float32, by name.

        `names` asks for those linears alone. Linears that read the same inputs get the same array.
        """
        return input_moments(self.network, self._rows(batches), names)

    def loss_moments(
        self, batches: Sequence[Batch], names: Collection[str] | None = None, seed: int = 0
    ) -> dict[str, NDArray[np.float32]]:
        """X^T diag(w) X likewise, w being what a token's outputs do to the model's predictions.

        `seed` draws the predictions. Raises ModelError where the head is no plain product.
        """
        head = self.loaded.head
        if head is None:
            raise ModelError(
                f"{self.checkpoint}: the head is the model's own, inputs cannot be weighed by it",
                'set quantize.importance = "inputs"',
            )
        return loss_moments(self.network, head, self._rows(batches), names, seed)

    def _rows(self, batches: Sequence[Batch]) -> list[Rows]:
        """The batches as this network reads them."""
        self.loaded.refuse_long(max(int(batch.positions_BT.max()) + 1 for batch in batches))
        layout = find_ability(self.network).layout
        return [layout(batch) for batch in batches]

    def trainer(self, train: Train, lora: Lora | None, weights: Weights, seed: int) -> MlxTrainer:
        """A trainer that takes this model over. `lora` None trains every weight.

        `weights` is the first adapter: `<linear>.lora_A.weight` (R, I), `<linear>.lora_B.weight`
        (O, R), DoRA's `<linear>.lora_magnitude_vector` (O,). Raises ModelError where it does not
        fit the model.
        """
        asked = {"train": asdict(train), "lora": lora and asdict(lora), "seed": seed}
        self._tell("train", asked, weights)
        if lora is None:
            places = full_places(self.network, self.checkpoint)
        else:
            places = lora_places(self.network, lora, weights)
        return MlxTrainer(self.loaded, places, train, seed)

    def codes_trainer(self, train: Train, seed: int) -> CodesTrainer:
        """A trainer of the scales and zero points in this model's own folder; takes it over.

        Raises ModelError where the folder holds no codes in a decoder layer.
        """
        self._tell("train on codes", {"train": asdict(train), "seed": seed}, {})
        coded = take_codes(self.network, DenseView(self.checkpoint), seed)
        refuse_dense(coded, self.checkpoint)
        return CodesTrainer(self.loaded, coded, train, seed)

    def recover(self, quantized: Path, batches: Sequence[Batch], tune: Tune) -> Recovered:
        """Tune the scales of a quantized folder until it predicts as this model does; see there.

        This model is the quantized one from then on. Raises ModelError where the head is no plain
        product.
        """
        rows = self._rows(batches)
        if self.loaded.head is None:
            raise refuse_no_head()
        parent = Parent(head=self.loaded.head, hidden=[])
        for row in rows:
            parent.hidden.append(real_states(self.network, row))
            mx.eval(parent.hidden)
        self.network = map_network(quantized, getattr(mx, self.dtype))
        self.loaded = replace(self.loaded, network=self.network, head=None)  # the parent may go
        tuning = Recovery(self.network, quantized, parent, rows, tune.seed)
        return recover(tuning, [batch.real_tokens for batch in batches], tune)

    def _tell(self, what: str, settings: dict[str, Any], weights: Weights) -> None:
        """What is about to be trained here is trained by all; none does where one cannot."""
        ring = find_ring()
        if ring and ring.number == 0:
            model = {"checkpoint": str(self.checkpoint.resolve()), "dtype": self.dtype}
            with ring.told(what, {**model, **settings}, weights):
                ring.agree(None)

    @functools.cached_property
    def _decoding(self) -> Decoding:
        return Decoding(batched=decodes_together(self.loaded))


def _add_saved_adapter(network: nn.Module, folder: Path) -> None:
    from pippin.model.adapter import load_adapter

    adapter = load_adapter(folder)
    scale = {name: adapter.scale_of(name) for name in adapter.linears}
    add_adapter(network, adapter.weights, scale, dropout=0.0)
