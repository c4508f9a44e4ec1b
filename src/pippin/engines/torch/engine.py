"""PyTorch on one device: loading a checkpoint, and what a loaded checkpoint can be asked.

Shape letters: B rows, T tokens, K kept tokens of a distribution.
"""

import contextlib
from collections.abc import Collection, Generator, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from pippin.data.batches import Batch
from pippin.engines import Sampling, Tokens, TopK, Weights
from pippin.engines.arrays import adapted
from pippin.engines.coded import refuse_dense
from pippin.engines.host import steady_heap
from pippin.engines.recovery import Recovered, Tune, recover, refuse_no_head
from pippin.engines.torch import device as devices
from pippin.engines.torch.adapting import add_adapter, add_to_embedding
from pippin.engines.torch.body import find_head
from pippin.engines.torch.coded import CodesTrainer, take_codes
from pippin.engines.torch.fisher import loss_moments
from pippin.engines.torch.generate import generate
from pippin.engines.torch.layered import LayeredModel, load_layered
from pippin.engines.torch.load import LoadOptions, load_network
from pippin.engines.torch.moments import input_moments
from pippin.engines.torch.names import full_parameters, lora_parameters
from pippin.engines.torch.probe import find_ability
from pippin.engines.torch.recovery import Recovery
from pippin.engines.torch.rows import Rows
from pippin.engines.torch.score import logprobs, topk
from pippin.engines.torch.trainer import TorchTrainer
from pippin.model.quantized import DenseView
from pippin.model.weights import Tensors
from pippin.recipe import Lora, Train


class TorchEngine:
    """PyTorch on one device."""

    def __init__(
        self, device: torch.device, remote_code: bool = False, attention: str = "auto"
    ) -> None:
        self._device = device
        self._options = LoadOptions(remote_code=remote_code, math=attention == "math")
        if device.type == "cpu":
            steady_heap()

    def load(self, checkpoint: Path, dtype: str, adapter: Path | None = None) -> "TorchModel":
        """A Hugging Face folder, plain or quantized in our layout, with an optional PEFT folder.

        `dtype` auto is bfloat16 where the device computes it natively, else float32. Quantized
        tensors are dequantized into it. Raises ModelError for a folder that cannot be loaded, or an
        adapter of another base.
        """
        picked = devices.pick_dtype(dtype, self._device)
        network = load_network(checkpoint, picked, self._device, self._options)
        if adapter is not None:
            _add_saved_adapter(network, adapter)
        return TorchModel(network, checkpoint)

    def load_layers(
        self, weights: Tensors, dtype: str, scratch: Path, *, sequential: bool = False
    ) -> LayeredModel | None:
        """A model read one decoder layer at a time; hidden states go to files in `scratch`.

        `sequential`: a layer's weights are read again before the inputs of the next one are found.
        None where it cannot be taken apart.
        """
        picked = devices.pick_dtype(dtype, self._device)
        return load_layered(weights, picked, self._device, scratch, sequential=sequential)

    def device(self) -> str:
        """The device in words, e.g. `cpu (2 cores)`."""
        return devices.describe(self._device)

    def dtype(self, name: str) -> str:
        """The dtype that a recipe's name stands for on this device: what `auto` picks."""
        return str(devices.pick_dtype(name, self._device)).removeprefix("torch.")

    def peak_memory(self) -> int:
        """Bytes: CUDA's allocator peak, MPS's driver figure, or the process's peak resident set."""
        return devices.peak_memory(self._device)


class TorchModel:
    """A loaded checkpoint on its device."""

    def __init__(self, network: PreTrainedModel, checkpoint: Path) -> None:
        self.network, self.checkpoint = network, checkpoint
        self._head = find_head(network)

    def logprobs(self, tokens_BT: Tokens) -> NDArray[np.float32]:
        """log p(token t+1 | tokens up to t), (B, T-1). Rows are padded on the right."""
        return logprobs(self.network, self._head, tokens_BT)

    def topk(self, tokens_BT: Tokens, k: int, ids_BTK: NDArray[np.int32] | None = None) -> TopK:
        """The k likeliest next tokens at every position, then the given ids, in one pass."""
        return topk(self.network, self._head, tokens_BT, k, ids_BTK)

    def generate(self, prompts: Sequence[Tokens], sampling: Sampling) -> Iterator[list[int | None]]:
        """Each step's token of every prompt; None for a row that has ended."""
        return generate(self.network, prompts, sampling)

    def input_moments(
        self, batches: Sequence[Batch], names: Collection[str] | None = None
    ) -> dict[str, NDArray[np.float32]]:
        """X^T X of every linear's inputs over the batches' real tokens, (D, D) float32, by name.

        `names` asks for those linears alone. Linears that read the same inputs get the same array.
        """
        with self._rows(batches) as rows:
            return input_moments(self.network, rows, names)

    def loss_moments(
        self, batches: Sequence[Batch], names: Collection[str] | None = None, seed: int = 0
    ) -> dict[str, NDArray[np.float32]]:
        """X^T diag(w) X likewise, w being what a token's outputs do to the model's predictions.

        E M E^T / 2 of a rounding error E is the divergence it costs, in nats over all tokens, to
        second order. `seed` draws the predictions.
        """
        with self._rows(batches) as rows:
            return loss_moments(self.network, self._head, rows, names, seed)

    def recover(self, quantized: Path, batches: Sequence[Batch], tune: Tune) -> Recovered:
        """Tune the scales of a quantized folder until it predicts as this model does; see there.

        Takes the model over. Raises ModelError where the head is no plain product.
        """
        if self._head is None:
            raise refuse_no_head()
        with self._rows(batches) as rows:
            tuning = Recovery(self.network, self._head, rows, quantized, tune.seed)
            return recover(tuning, [batch.real_tokens for batch in batches], tune)

    @contextlib.contextmanager
    def _rows(self, batches: Sequence[Batch]) -> Generator[list[Rows]]:
        """The batches as this network reads them."""
        own = self.network.config._attn_implementation
        layout = find_ability(self.network).layout
        try:
            yield [layout(batch, self.network.device) for batch in batches]
        finally:
            self.network.set_attn_implementation(own)

    def trainer(self, train: Train, lora: Lora | None, weights: Weights, seed: int) -> TorchTrainer:
        """A trainer that takes this model over. `lora` None trains every weight.

        `weights` is the first adapter: `<linear>.lora_A.weight` (R, I), `<linear>.lora_B.weight`
        (O, R), DoRA's `<linear>.lora_magnitude_vector` (O,). Raises ModelError where it does not
        fit the model.
        """
        if lora is None:
            trainable = full_parameters(self.network, self.checkpoint)
        else:
            trainable = lora_parameters(self.network, lora, weights)
        return TorchTrainer(self.network, trainable, train, seed)

    def codes_trainer(self, train: Train, seed: int) -> CodesTrainer:
        """A trainer of the scales and zero points in this model's own folder; takes it over.

        Raises ModelError where the folder holds no codes in a decoder layer.
        """
        coded = take_codes(self.network, DenseView(self.checkpoint), seed)
        refuse_dense(coded, self.checkpoint)
        return CodesTrainer(self.network, coded, train, seed)


def _add_saved_adapter(network: PreTrainedModel, folder: Path) -> None:
    from pippin.model.adapter import load_adapter

    adapter = load_adapter(folder)
    linears = {
        name: array
        for name, array in adapter.weights.items()
        if name.rpartition(".lora_")[0] not in adapter.embeddings
    }
    for name in adapter.embeddings:
        pair = (adapter.weights[f"{name}.lora_{side}.weight"] for side in "BA")
        add_to_embedding(network, name, adapter.scale_of(name), *pair)
    scale = {name: adapter.scale_of(name) for name in adapted(linears)}
    add_adapter(network, linears, scale, dropout=0.0)
    network.requires_grad_(False)
