"""What calibrated quantizers know of a model: Hessians over training rows, a few layers at a time.

Shape letters: I input features.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from pippin import memory
from pippin.data.batches import Batch, Sample, single_batches
from pippin.data.chat import tokenize
from pippin.data.dataset import load_file, load_split
from pippin.data.shapes import Row
from pippin.engines import LayerLoader, LossWeigher, Observed
from pippin.errors import DataError, ModelError
from pippin.job import Job
from pippin.model import names
from pippin.model.config import ModelConfig
from pippin.model.tokenizer import load_tokenizer
from pippin.model.weights import Tensors, is_finite, row_chunks
from pippin.quantizers import CALIBRATED
from pippin.quantizers.choices import Choice
from pippin.quantizers.hessian import Hessian
from pippin.quantizers.in_turn import outputs_of
from pippin.recipe import Recipe
from pippin.stages.checkpoints import work_folder
from pippin.stages.coding import refuse_infinite
from pippin.stages.loading import open_engine

# Tokens of one forward pass, padding included.
_BATCH_TOKENS = 2048
# The same where a backward pass keeps what every layer computed.
_BACKWARD_TOKENS = 1024
# From this many bits on, an embedding or a head loses next to nothing by plain rounding.
_PLAIN_BITS = 8


@dataclass(kw_only=True)
class Calibration:
    """A loaded model and its weights, the rows it reads, and how many tokens they have.

    `by_layer` says that the model is read layer by layer: `in_layers` is the order to ask in.

    With `by_loss` a token counts by its part in the predictions, which `seed` draws. `further` are
    rows for recovery, where it is asked for, and `again` those of the calibration's own that it
    takes where there are not enough.
    """

    model: Observed
    checkpoint: Tensors
    batches: list[Batch]
    rows: int
    tokens: int
    notices: tuple[str, ...]
    by_loss: bool = False
    by_layer: bool = False
    seed: int = 0
    further: tuple[Sample, ...] = ()
    again: tuple[Sample, ...] = ()
    _read: tuple[frozenset[str], dict[str, NDArray[np.float32]]] = field(
        default=(frozenset(), {}), init=False
    )

    def unseen(self, part: Mapping[str, str]) -> list[str]:
        """Tensors of `part` (linear by tensor) whose linear the model lacks."""
        moments = self._moments(part)
        return [name for name, linear in part.items() if linear not in moments]

    def hessians(self, part: Mapping[str, str]) -> Iterator[tuple[str, Hessian | None]]:
        """Tensor by tensor of `part`; linears that read the same inputs share one.

        Raises ModelError where inputs are not finite.
        """
        moments = self._moments(part)
        left = Counter(id(moments[linear]) for linear in part.values() if linear in moments)
        made: dict[int, Hessian] = {}
        for name, linear in part.items():
            if linear not in moments:
                yield name, None
                continue
            key = id(moments[linear])
            if key not in made:
                made[key] = self._hessian(linear, moments)
            left[key] -= 1
            if self.by_layer and not left[key]:
                self._drop(moments[linear])
            yield name, made[key] if left[key] else made.pop(key)

    def _drop(self, moment_II: NDArray[np.float32]) -> None:
        """Of a large model they are the most there is in memory; asked again, it is read again."""
        linears, moments = self._read
        dropped = [name for name, moment in moments.items() if moment is moment_II]
        for name in dropped:
            del moments[name]
        self._read = (linears.difference(dropped), moments)

    def _hessian(self, linear: str, moments: Mapping[str, NDArray[np.float32]]) -> Hessian:
        if not np.isfinite(moments[linear]).all():
            self._blame(linear)
        return Hessian(moments[linear], outputs_OS=moments.get(outputs_of(linear)))

    def _moments(self, part: Mapping[str, str]) -> dict[str, NDArray[np.float32]]:
        """Those of the last part asked for are kept: it is asked for again."""
        linears = frozenset(part.values())
        if not linears <= self._read[0]:
            self._read = (frozenset(), {})
            if self.by_loss:
                assert isinstance(self.model, LossWeigher)
                moments = self.model.loss_moments(self.batches, linears, self.seed)
            else:
                moments = self.model.input_moments(self.batches, linears)
            self._read = (linears, moments)
        return self._read[1]

    def _blame(self, name: str) -> NoReturn:
        """The weights, where they are not finite themselves."""
        for tensor, info in self.checkpoint.tensors.items():
            for start, stop in row_chunks(info, 8 << 20) if info.shape else ():
                refuse_infinite(tensor, is_finite(self.checkpoint.read_rows(tensor, start, stop)))
        raise ModelError(
            f"the inputs of {name} are not finite on the calibration rows",
            'the model overflows: set model.dtype = "float32"',
        )


def calibrate(job: Job, checkpoint: Tensors, *, large: bool = False) -> Calibration:
    """Load the model that is quantized and draw rows for it from the training split.

    `checkpoint` are its weights; an adapter among the job's inputs is loaded with its base. A
    `large` model is read layer by layer, where the engine can.

    Raises DataError where there is none.
    """
    recipe, folder = job.recipe, job.inputs["model"]
    rows, kind = _rows(job)
    tokenized = tokenize(rows, load_tokenizer(folder), recipe.data)
    if not tokenized.samples:
        raise DataError(
            f"none of the {len(rows)} {kind} can be read for calibration",
            'quantize.method = "mse" does without',
        )
    asked_tokens = recipe.quantize.calibration_tokens
    samples = draw(tokenized.samples, asked_tokens, recipe.seed)
    further, again = _for_recovery(recipe, tokenized.samples, samples)
    tokens = _tokens(samples)
    longest = max(len(sample.tokens) for sample in samples)
    model, by_layer = _load(job, checkpoint, large)
    asked = CALIBRATED[recipe.quantize.method].by_loss and recipe.quantize.importance == "loss"
    by_loss = asked and isinstance(model, LossWeigher)
    notices = _notices(f"{len(samples):,} {kind}", tokens, asked_tokens)
    if asked and not by_loss:
        notices += (f"engine {recipe.model.engine} has no gradients of inputs: all count alike",)
    if by_layer:
        notices += ("the model is read one decoder layer at a time",)
    batch_tokens = _BACKWARD_TOKENS if by_loss else _BATCH_TOKENS
    return Calibration(
        model=model,
        checkpoint=checkpoint,
        batches=single_batches(samples, max(1, batch_tokens // longest)),
        rows=len(samples),
        tokens=tokens,
        notices=notices,
        by_loss=by_loss,
        by_layer=by_layer,
        seed=recipe.seed,
        further=further,
        again=again,
    )


def _rows(job: Job) -> tuple[list[Row], str]:
    """What is read, and what it is called."""
    recipe, file = job.recipe, job.inputs.get("calibration")
    if file is None:
        return load_split(recipe.data, recipe.folder, "train"), "training rows"
    return load_file(file, recipe.data), f"rows of {file.name}"


def _load(job: Job, checkpoint: Tensors, large: bool) -> tuple[Observed, bool]:
    """The model, and whether it is read layer by layer.

    Raises ModelError where it must be and cannot.
    """
    asked, folder = job.recipe.model, job.inputs["model"]
    sequential = job.recipe.quantize.sequential
    engine = open_engine(asked)
    if large and isinstance(engine, LayerLoader):
        scratch = work_folder(job.folder)
        layers = engine.load_layers(checkpoint, asked.dtype, scratch, sequential=sequential)
        if layers is not None:
            return layers, True
    if sequential:
        raise ModelError(
            f"engine {asked.engine} does not take this model apart layer by layer",
            "set quantize.sequential = false",
        )
    return engine.load(folder, asked.dtype, job.inputs.get("adapter")), False


def draw(samples: list[Sample], tokens: int, seed: int) -> list[Sample]:
    """Samples in an order that follows from the seed, until they have so many tokens."""
    drawn, used = [], 0
    for index in np.random.default_rng(seed).permutation(len(samples)):
        if used >= tokens:
            break
        drawn.append(samples[index])
        used += len(samples[index].tokens)
    return drawn


def _for_recovery(
    recipe: Recipe, samples: list[Sample], calibrated: list[Sample]
) -> tuple[tuple[Sample, ...], tuple[Sample, ...]]:
    """Samples that did not calibrate, and those that did where there are not enough."""
    asked = recipe.quantize
    drawn = draw(samples, asked.calibration_tokens + asked.recover_tokens, recipe.seed)
    further = drawn[len(calibrated) :]
    lacking = asked.recover_tokens - _tokens(further)
    return tuple(further), tuple(draw(calibrated, lacking, recipe.seed))


def _tokens(samples: Iterable[Sample]) -> int:
    return sum(len(sample.tokens) for sample in samples)


def _notices(rows: str, tokens: int, wanted: int) -> tuple[str, ...]:
    text = f"calibrated on {tokens:,} tokens of {rows}"
    if tokens < wanted:
        return (f"{text}, all there are; quantize.calibration_tokens asks for {wanted:,}",)
    return (text,)


def passes(
    checkpoint: Tensors,
    choices: dict[str, Choice],
    config: ModelConfig,
    budget: int,
    plain_bits: int = _PLAIN_BITS,
) -> Iterator[dict[str, str]]:
    """Linear by the tensor that is rounded under its inputs, as many as the budget holds.

    At least one tensor each; the moments of a pass have `budget` bytes at most, or one's own. An
    embedding or head of `plain_bits` is left out.
    """
    held, part = 0, dict[str, str]()
    for name in sorted(choices, key=names.natural):
        linear = _linear(name, choices[name], config, plain_bits)
        if linear is None:
            continue
        outputs, inputs = checkpoint.tensors[name].shape
        size = memory.linear_moments(inputs, 0 if names.layer(name) is None else outputs)
        if part and held + size > budget:
            yield part
            held, part = 0, {}
        part[name] = linear
        held += size
    if part:
        yield part


def in_layers(parts: Iterable[dict[str, str]], *, back: bool) -> Iterator[dict[str, str]]:
    """The same tensors by layer, in the order in which a layered model has their moments.

    `back` from the head down, else from the first layer to the head.
    """
    layers: dict[float, dict[str, str]] = {}
    for part in parts:
        for name, linear in part.items():
            number = names.layer(name)
            layers.setdefault(math.inf if number is None else number, {})[name] = linear
    yield from (layers[number] for number in sorted(layers, reverse=back))


def _linear(name: str, choice: Choice, config: ModelConfig, plain_bits: int) -> str | None:
    """The linear whose inputs a tensor is rounded under; None where it is rounded without."""
    module = names.module(name)
    if choice.grid is None:
        return None
    if names.is_embedding(module) or names.is_head(module):
        if choice.grid.bits >= plain_bits:
            return None
        if names.is_embedding(module):
            return names.module(names.HEAD) if config.tied_embeddings else None
    return module
