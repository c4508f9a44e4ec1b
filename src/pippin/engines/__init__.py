"""The one interface that differs by framework: tokens in, floats out, never logits.

Shape letters: B batch, T tokens, K kept tokens of a distribution, D features.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from pippin.data.batches import Batch
from pippin.engines.host import refuse_several
from pippin.errors import Refusal
from pippin.model.weights import Tensors
from pippin.recipe import Lora, Train

Tokens: TypeAlias = NDArray[np.int32]
Weights: TypeAlias = dict[str, NDArray[Any]]

ENGINES = {
    "jax": "pippin.engines.jax",
    "mlx": "pippin.engines.mlx",
    "torch": "pippin.engines.torch",
}
# What each imports beside pippin's own dependencies.
PACKAGES = {"jax": ("jax", "optax"), "mlx": ("mlx", "mlx_lm"), "torch": ("torch",)}


@dataclass(frozen=True, kw_only=True, slots=True)
class TopK:
    """The likeliest next tokens at every position, (B, T, K), likeliest first, then asked ones."""

    ids_BTK: NDArray[np.int32]
    logprobs_BTK: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How `generate` picks tokens. Temperature 0 is greedy; a `stop` token is not yielded."""

    max_tokens: int
    stop: frozenset[int] = frozenset()
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """One optimizer update: loss in nats, summed over the scored tokens, before the update."""

    loss_sum: float
    tokens: int
    grad_norm: float


class Scorer(Protocol):
    """What can be measured: an engine's model, or a deployed file in its runtime."""

    def logprobs(self, tokens_BT: Tokens) -> NDArray[np.float32]:
        """log p(token t+1 | tokens up to t), shape (B, T-1). Rows are padded on the right."""
        ...

    def topk(self, tokens_BT: Tokens, k: int, ids_BTK: NDArray[np.int32] | None = None) -> TopK:
        """The k likeliest next tokens at every position, then the given ids, in one pass.

        The result's K is k and as many as were given; k = 0 gives the given ids alone.
        """
        ...

    def generate(self, prompts: Sequence[Tokens], sampling: Sampling) -> Iterator[list[int | None]]:
        """Each step's token of every prompt; None for a row that has ended."""
        ...


class Trainer(Protocol):
    """A model being trained; the frozen weights are never touched."""

    shares: bool  # samples of a micro-batch that begin alike compute their beginning once

    @property
    def notices(self) -> tuple[str, ...]:
        """What was replaced by something slower, in words."""
        ...

    def step(
        self,
        batches: Sequence[Batch],
        learning_rate: float,
        upcoming: Callable[[], Sequence[Batch]] = tuple,
    ) -> StepResult:
        """One AdamW update over the micro-batches, each token weighing the same.

        Where the loss or the gradient norm is not finite, no update is made; the result tells.
        `upcoming` gives the batches that the next call will bring: an engine that waits for its
        device may begin with them meanwhile. Other batches may still come.
        """
        ...

    def loss(self, batch: Batch) -> tuple[float, int]:
        """Summed loss in nats and count of scored tokens; no gradient, dropout off."""
        ...

    def weights(self) -> Weights:
        """The trainable tensors, copied to the host in float32, under checkpoint names.

        A LoRA pair is `<linear>.lora_A.weight` (R, I) and `<linear>.lora_B.weight` (O, R); DoRA
        adds `<linear>.lora_magnitude_vector` (O,).
        """
        ...

    def state(self) -> Weights:
        """All that `restore` needs to go on bit for bit: weights, moments, step, random states."""
        ...

    def restore(self, state: Weights) -> None:
        """Take up a state that `state` returned."""
        ...


class Model(Scorer, Protocol):
    """A loaded checkpoint."""

    def input_moments(
        self, batches: Sequence[Batch], names: Collection[str] | None = None
    ) -> dict[str, NDArray[np.float32]]:
        """X^T X of every linear's inputs over the batches' real tokens, (D, D) float32, by name.

        `names` asks for those linears alone; one the model lacks is left out. Linears that read the
        same inputs get the same array.
        """
        ...

    def trainer(self, train: Train, lora: Lora | None, weights: Weights, seed: int) -> Trainer:
        """A trainer that takes this model over. `lora` None trains every weight.

        `weights` is the first adapter (empty for full fine-tuning): engines start from equal bytes.
        """
        ...


@runtime_checkable
class LossWeigher(Protocol):
    """What the models of some engines can do besides: weigh inputs by the predictions they move."""

    def loss_moments(
        self, batches: Sequence[Batch], names: Collection[str] | None = None, seed: int = 0
    ) -> dict[str, NDArray[np.float32]]:
        """X^T diag(w) X as `input_moments` gives X^T X, an array of its own for every linear.

        w is a token's mean squared gradient over the linear's outputs, of a prediction that `seed`
        draws from the model, brought halfway to the batch's mean. So 1/2 E M E^T of an error E of
        the weights is the divergence it costs, in nats over all tokens, to second order. What a
        linear's outputs weigh together stands under `in_turn.outputs_of` its name; the head's not.
        """
        ...


@runtime_checkable
class CacheQuantizer(Protocol):
    """What the models of some engines can do besides: answer from fewer bits of keys and values."""

    def quantize_cache(self, bits: int) -> None:
        """From now on `generate` keeps keys and values in so many bits; ModelError if it cannot."""
        ...


@runtime_checkable
class CodesTrainable(Protocol):
    """What the models of some engines can do besides: train what their own codes say."""

    def codes_trainer(self, train: Train, seed: int) -> Trainer:
        """A trainer of the folder's scales and zero points, on the loss; takes the model over.

        Every forward computes with what would be stored, and codes stay. Its `weights` are scales
        and biases under their tensors' names, in values that their own dtype holds. Raises
        ModelError where there are no codes in the layers.
        """
        ...


class Observed(Protocol):
    """A model that can be calibrated on, if nothing else."""

    def input_moments(
        self, batches: Sequence[Batch], names: Collection[str] | None = None
    ) -> dict[str, NDArray[np.float32]]:
        """As Model.input_moments."""
        ...


@runtime_checkable
class LayerLoader(Protocol):
    """What some engines can do besides: calibrate in the memory of one decoder layer."""

    def load_layers(
        self, weights: Tensors, dtype: str, scratch: Path, *, sequential: bool = False
    ) -> Observed | None:
        """A model whose layers are read when it is their turn; None where it has none such.

        Moments are to be asked for layer by layer: of inputs from the first layer on, of the loss
        (it is a LossWeigher then) from the head down. `scratch` is a folder for hidden states.
        `sequential`: a layer's weights are read again before the inputs of the next one are found,
        which then follow from what they have become.
        """
        ...


class Engine(Protocol):
    """A framework on one device."""

    def load(self, checkpoint: Path, dtype: str, adapter: Path | None = None) -> Model:
        """A Hugging Face folder, plain or quantized in our layout, with an optional PEFT folder.

        Raises ModelError for a folder that cannot be loaded, or an adapter of another base.
        """
        ...

    def device(self) -> str:
        """The device in words, e.g. `cpu (2 cores)`."""
        ...

    def dtype(self, name: str) -> str:
        """The dtype that a recipe's name stands for on this device: what `auto` picks."""
        ...

    def peak_memory(self) -> int:
        """Bytes: the device allocator's peak, or the process's peak resident set on a CPU."""
        ...


@runtime_checkable
class DriverMemory(Protocol):
    """What an engine does besides whose device shares the machine's memory."""

    def driver_memory(self) -> tuple[int, int]:
        """Bytes that the GPU's driver has given this process, and that it recommends to take.

        Caches are emptied first where they come near it.
        """
        ...


def missing_package(name: str) -> str | None:
    """The first package that an engine lacks here; nothing is imported to find out."""
    lacking = (p for p in PACKAGES[name] if importlib.util.find_spec(p) is None)
    return next(lacking, None)


def check_family(name: str, folder: Path) -> Refusal | None:
    """Why an engine cannot compute the model in a folder, told before any work; None if it can."""
    return importlib.import_module(f"{ENGINES[name]}.families").refusal(folder)


def load_engine(
    name: str, device: str = "auto", remote_code: bool = False, attention: str = "auto"
) -> Engine:
    """The engine behind a name of ENGINES; the only place where a framework gets imported.

    `remote_code` lets it run Python code that lies in a model's folder; `attention` is math for
    plain products in the place of fused kernels, which PyTorch alone offers. Raises UsageError in
    one of several processes that were launched together, where the engine does not share work.
    """
    if name != "mlx" or "MLX_RANK" not in os.environ:
        refuse_several(name)
    make = importlib.import_module(ENGINES[name]).make_engine
    extra = () if attention == "auto" else (attention,)
    return cast("Engine", make(device, remote_code, *extra))
