"""JAX on one device: loading a checkpoint, and what a loaded checkpoint can be asked.

Shape letters: B rows, T tokens, K kept tokens of a distribution, L layers.
"""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from pippin.data.batches import Batch
from pippin.engines import Sampling, Tokens, TopK, Weights
from pippin.engines.arrays import adapted
from pippin.engines.jax import device as devices
from pippin.engines.jax.architecture import Spec
from pippin.engines.jax.decoder import Net
from pippin.engines.jax.generate import generate
from pippin.engines.jax.load import Loaded, dequantize, load_params
from pippin.engines.jax.lora import scaled, stack_pairs, stack_scales
from pippin.engines.jax.moments import input_moments
from pippin.engines.jax.products import Lora as Adapter
from pippin.engines.jax.products import plain
from pippin.engines.jax.score import logprobs, topk
from pippin.engines.jax.trainable import adapter_weights, all_weights
from pippin.engines.jax.trainer import Frozen, JaxTrainer, Settings
from pippin.errors import UsageError
from pippin.recipe import Lora, Train


class JaxEngine:
    """JAX on one device."""

    def __init__(self, device: jax.Device) -> None:
        self._device = device

    def load(self, checkpoint: Path, dtype: str, adapter: Path | None = None) -> "JaxModel":
        """A Hugging Face folder, plain or quantized in our layout, with an optional PEFT folder.

        `dtype` auto is bfloat16 on an accelerator, float32 on a CPU. Quantized linears keep their
        codes for training; for anything else they are dequantized into it first.
        Raises ModelError for a family that the engine lacks, for a folder that cannot be loaded, or
        an adapter of another base.
        """
        picked = devices.pick_dtype(dtype, self._device)
        loaded = load_params(checkpoint, picked, self._device)
        lora = {} if adapter is None else _saved_adapter(loaded.spec, adapter, self._device)
        return JaxModel(loaded, lora, self._device)

    def device(self) -> str:
        """The device in words, e.g. `cpu (2 cores)`."""
        return devices.describe(self._device)

    def dtype(self, name: str) -> str:
        """The dtype that a recipe's name stands for on this device: what `auto` picks."""
        return devices.pick_dtype(name, self._device)

    def peak_memory(self) -> int:
        """Bytes: the device allocator's peak, or the process's peak resident set on a CPU."""
        return devices.peak_memory(self._device)


class JaxModel:
    """A loaded checkpoint on its device."""

    def __init__(self, loaded: Loaded, lora: Adapter, device: jax.Device) -> None:
        self.spec, params, self.notices = loaded
        self._net, self.device = Net(params, lora), device

    @property
    def net(self) -> Net:
        """Weights and adapter. Codes are dequantized for good: a token alone would do it again."""
        dequantize(self.spec, self._net.params, self.device)
        return self._net

    def logprobs(self, tokens_BT: Tokens) -> NDArray[np.float32]:
        """log p(token t+1 | tokens up to t), (B, T-1). Rows are padded on the right."""
        return logprobs(self.spec, self.net, tokens_BT)

    def topk(self, tokens_BT: Tokens, k: int, ids_BTK: NDArray[np.int32] | None = None) -> TopK:
        """The k likeliest next tokens at every position, then the given ids, in one pass."""
        return topk(self.spec, self.net, tokens_BT, k, ids_BTK)

    def generate(self, prompts: Sequence[Tokens], sampling: Sampling) -> Iterator[list[int | None]]:
        """Each step's token of every prompt; None for a row that has ended."""
        return generate(self.spec, self.net, prompts, sampling)

    def input_moments(
        self, batches: Sequence[Batch], names: Collection[str] | None = None
    ) -> dict[str, NDArray[np.float32]]:
        """X^T X of every linear's inputs over the batches' real tokens, (D, D) float32, by name.

        `names` asks for those linears alone. Linears that read the same inputs get the same array.
        """
        return input_moments((self.spec, self.net), batches, names)

    def trainer(self, train: Train, lora: Lora | None, weights: Weights, seed: int) -> JaxTrainer:
        """A trainer that takes this model over. `lora` None trains every weight.

        `weights` is the first adapter: `<linear>.lora_A.weight` (R, I), `<linear>.lora_B.weight`
        (O, R), DoRA's `<linear>.lora_magnitude_vector` (O,). Raises ModelError where it does not
        fit the model.
        """
        _refuse_float8(train)
        first: Any
        if lora is None:
            dequantize(self.spec, self._net.params, self.device)
        params, self._net = self._net.params, Net({}, {})
        settings = Settings(
            train=train,
            dropout=lora.dropout if lora else 0.0,
            seed=seed,
            dtype=str(params["embed"].dtype),
            devices=tuple(jax.devices(self.device.platform)),
            notices=self.notices,
        )
        if lora is None:
            first = jax.tree.map(plain, params)
            return JaxTrainer(first, Frozen({}, {}), all_weights(self.spec), settings)
        first = stack_pairs(self.spec, weights)
        scales: Any = stack_scales(self.spec, dict.fromkeys(adapted(weights), lora.scale))
        first, scales = jax.device_put((first, scales), self.device)
        trainable = adapter_weights(self.spec, weights)
        return JaxTrainer(first, Frozen(params, scales), trainable, settings)


def _saved_adapter(spec: Spec, folder: Path, device: jax.Device) -> Adapter:
    from pippin.model.adapter import load_adapter

    adapter = load_adapter(folder)
    pairs: Any = stack_pairs(spec, adapter.weights)
    scales: Any = stack_scales(spec, {name: adapter.scale_of(name) for name in adapter.linears})
    placed: Any = jax.device_put((pairs, scales), device)
    return scaled(*placed)


def _refuse_float8(train: Train) -> None:
    if train.frozen_dtype == "float8":
        raise UsageError(
            "the engine jax does not compute frozen weights in float8",
            'set train.frozen_dtype = "auto", or use engine torch on a CUDA card',
        )
