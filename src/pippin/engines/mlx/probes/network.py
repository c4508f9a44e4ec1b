"""A probe of a small network of the planned head width: an update of packed samples.

Shape letters: B rows, T tokens, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from pippin.check import Case, Shapes
from pippin.check.families import Family
from pippin.data.batches import Sample, lay_out
from pippin.engines import Weights
from pippin.engines.mlx.attention import accept_positions
from pippin.engines.mlx.body import Loaded, find_head, scalar
from pippin.engines.mlx.names import Place, lora_places
from pippin.engines.mlx.probes.bench import gap
from pippin.engines.mlx.trainer import MlxTrainer
from pippin.recipe import Lora, Train

VOCAB, HIDDEN, LENGTHS = 199, 64, (3, 40, 150)
LORA = Lora(rank=4, alpha=8.0)
TRAIN = Train(max_grad_norm=0.0)


def update(shapes: Shapes, dtype: mx.Dtype) -> Iterator[Case]:
    """Loss and gradients of packed samples, as our trainer makes them on the device.

    Wanted are those of mlx-lm's own code, a sample at a time in float32 on the CPU.
    """
    network = _network(shapes, dtype)
    head = find_head(network, {})
    loaded = Loaded(network=network, head=head, longest=None, notices=())
    trainer = MlxTrainer(loaded, lora_places(network, LORA, _weights(network)), TRAIN, 0)
    result = trainer.step([lay_out([_samples()], sum(LENGTHS))], 1e-3)
    loss, grads = _wanted(shapes)
    yield "loss", gap(result.loss_sum, loss)
    moment = (1 - TRAIN.beta1) / result.tokens
    for name, mean in trainer.optimizer.moments[0].items():
        yield name, gap(np.array(mean) / moment, grads[name])


def _wanted(shapes: Shapes) -> tuple[float, Weights]:
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    try:
        network = _network(shapes, mx.float32)
        places = lora_places(network, LORA, _weights(network))
        start = {name: place.get() for name, place in places.items()}
        loss, grads = mx.value_and_grad(lambda masters: _loss(network, places, masters))(start)
        return scalar(loss), {name: np.array(grad) for name, grad in grads.items()}
    finally:
        mx.set_default_device(device)


def _loss(network: Any, places: dict[str, Place], masters: dict[str, mx.array]) -> mx.array:
    for name, place in places.items():
        place.put(masters[name])
    total = mx.array(0.0)
    for sample in _samples():
        tokens_BT = mx.array(sample.tokens)[None]
        logits_BTV = network(tokens_BT)[:, :-1]
        total = total + nn.losses.cross_entropy(logits_BTV, tokens_BT[:, 1:], reduction="sum")
    return total


def _network(shapes: Shapes, dtype: mx.Dtype) -> Any:
    config = llama.ModelArgs(
        model_type="llama",
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=shapes.head_dim,
        rms_norm_eps=1e-5,
        vocab_size=VOCAB,
    )
    network = llama.Model(config)
    rng = np.random.default_rng(0)
    parameters: dict[str, mx.array] = dict(tree_flatten(network.parameters()))
    drawn = {
        name: (array.ndim == 1) + 0.1 * rng.standard_normal(array.shape)
        for name, array in parameters.items()
    }
    network.load_weights([(n, mx.array(a.astype(np.float32))) for n, a in drawn.items()])
    network.set_dtype(dtype)
    accept_positions(network)
    network.freeze()
    return network


def _weights(network: Any) -> Weights:
    """A live adapter of queries, values and the feed-forward."""
    rng, weights = np.random.default_rng(1), {}
    for name, linear in network.named_modules():
        if name.endswith(("q_proj", "v_proj", "up_proj", "down_proj")):
            outputs, inputs = linear.weight.shape
            for side, shape in {"A": (LORA.rank, inputs), "B": (outputs, LORA.rank)}.items():
                drawn = 0.1 * rng.standard_normal(shape)
                weights[f"{name}.lora_{side}.weight"] = drawn.astype(np.float32)
    return weights


def _samples() -> list[Sample]:
    rng = np.random.default_rng(2)
    return [
        Sample(tokens=rng.integers(3, VOCAB, n).astype(np.int32), scored=np.arange(n) > 0, row=row)
        for row, n in enumerate(LENGTHS)
    ]


FAMILIES = (
    Family(name="network.update", measure=update, dtypes=("float32", "bfloat16"), factor=2.0),
)
