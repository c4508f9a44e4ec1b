"""What training holds at its high points: arithmetic over a model's shape, no framework.

An update is high four times: at the loss, where a chunk of logits stands beside all that layers
keep (layers.py); in the last layer's backward; at its end, where every gradient is there; and
in the step of the optimizer. On a CPU a checkpoint copies masters and moments besides; on CUDA
layers are compared with plain ones before the first update.

Letters: n tokens at once, D hidden, F feed-forward, V vocabulary, b bytes of an element.
"""

import math
from dataclasses import dataclass, replace

from pippin import memory
from pippin.memory.layers import (
    Shape,
    TrainShape,
    by_hand,
    compiled,
    family_of,
    frames,
    layer_kept,
    plain_kept,
    widths,
)

LOSS_BYTES = 96 << 20  # logits that exist at once on CUDA (engines/torch/loss.py)
OTHER_LOSS_BYTES = 64 << 20  # the same in float32, elsewhere
PACKED_GROUPS = (32, 64, 128, 256)  # of 4-bit codes that the CPU's kernel takes


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainBytes:
    """Where training's memory goes: what stays, then what each high point adds to it.

    `holes` stand between what layers keep in blocks that a CPU's allocator does not give back.
    """

    weights: int
    masters: int
    moments: int
    gradients: int
    at_start: int
    kept: int
    at_loss: int
    in_backward: int
    at_end: int
    in_update: int
    in_checkpoint: int
    holes: int

    @property
    def high(self) -> int:
        """The most that is there besides weights, masters and moments."""
        return max(
            self.kept + self.at_loss,
            self.kept + self.in_backward,
            self.gradients + self.at_end,
            self.gradients + self.in_update,
            self.in_checkpoint,
        )

    @property
    def total(self) -> int:
        """The peak of all tensors."""
        return self.weights + self.masters + max(self.at_start, self.moments + self.high)


def train_bytes(shape: Shape, train: TrainShape) -> TrainBytes:
    """Tensors alone: what a framework and an allocator add is not in it."""
    t, b = train.trained, train.itemsize
    table = shape.vocab_size * shape.hidden_size
    layer, ends = sum(layer_kept(shape, train)), train.tokens * b * shape.hidden_size
    count = shape.num_layers
    cuda = train.device == "cuda"
    early = 4 * t if train.accumulates or (train.adapted and cuda) else 0  # gradients
    again = math.ceil(train.checkpointing * count)  # only their inputs are kept
    kept = again * ends + (count - again) * layer
    fresh = layer if again == count else 0  # else a kept one is gone by then
    blocks = again * ends + max(1, count - again) * layer
    head = table * b if train.full else 0
    return TrainBytes(
        weights=weight_bytes(shape, train),
        masters=(0 if train.full and b == 4 else 4 * t) + _places(shape, train),
        moments=8 * t,
        gradients=4 * t,
        at_start=_trial(shape, train, ends),
        kept=kept + _casts(shape, train) * max(1, count - again) // count + early,
        at_loss=3 * ends + _loss(shape, train) + (4 * table + head if train.full else 0),
        in_backward=3 * ends * cuda + fresh + head + _backward(shape, train),
        at_end=(layer + 2 * head) if train.full else 0,
        in_update=4 * memory.largest_tensor(shape) if train.full else 0,
        in_checkpoint=12 * t if train.device == "cpu" else 0,
        holes=int(_frayed(shape, train) * blocks),
    )


def weight_bytes(shape: Shape, train: TrainShape) -> int:
    """Of all weights: in b bytes, in frames where layers run by hand, or in codes."""
    b = train.itemsize
    linears = sum(i * o for i, o in memory.linear_shapes(shape).values())
    rest = memory.parameters(shape) - shape.num_layers * linears
    layer = linears * b
    if by_hand(shape, train) and train.device == "cuda":
        unit = 128 // b
        layer = sum(b * (o + e) * (-(-(i + e) // unit) * unit) for i, o, e in frames(shape, train))
    elif train.packed:
        layer = int(linears * train.packed)
    return rest * b + shape.num_layers * layer


def _frayed(shape: Shape, train: TrainShape) -> float:
    """Holes of a CPU's heap as a share of what layers keep; fitted to runs.

    Layers by hand make few blocks that live shortly, unpacked codes are many.
    """
    if train.device != "cpu" or by_hand(shape, train):
        return 0.0
    return 0.53 if train.packed else 0.3


def _trial(shape: Shape, train: TrainShape, ends: int) -> int:
    """Bytes beside weights and masters when CUDA's layers are compared with the plain ones.

    The inputs of all layers, all that a plain layer without our norms keeps, its backward, results
    of both sides; a layer by hand stands beside the one that it replaces, no frame elsewhere yet.
    """
    if train.device != "cuda" or not (by_hand(shape, train) or compiled(shape, train)):
        return 0
    b, d, f = train.itemsize, shape.hidden_size, shape.intermediate_size
    plain = sum(plain_kept(shape, replace(train, device="")))
    if not family_of(shape).own:  # transformers' own norms and gate
        plain += train.tokens * (2 * (4 - b) * d + b * f)
    back = train.tokens * b * (3 * f + d)
    beside = (shape.num_layers + 6) * ends + plain + back
    if not by_hand(shape, train):
        return beside
    layer = b * sum(i * o for i, o in memory.linear_shapes(shape).values())
    return beside + layer - (weight_bytes(shape, train) - b * memory.parameters(shape))


def _backward(shape: Shape, train: TrainShape) -> int:
    """What the last layer's backward makes while all is still kept, bytes."""
    n, b, d, f = train.tokens, train.itemsize, shape.hidden_size, shape.intermediate_size
    if compiled(shape, train):
        return n * b * (2 * f + d)
    if by_hand(shape, train) and train.device == "cpu":
        q, k = widths(shape)
        return n * b * (3 * f + 5 * d + 2 * q + 2 * k)
    plain = train.math or train.device == "mps"
    scores = 8 * shape.num_heads * train.longest**2 if plain else 0
    norms = 24 * n * d if family_of(shape).own else 0  # six of them in float32
    wide = n * b * ((2 if train.packed else 3) * f + d)
    dense = 2 * memory.largest_linear(shape) if train.packed else 0
    return max(wide + dense, norms, scores)


def _loss(shape: Shape, train: TrainShape) -> int:
    """A chunk of logits in the model's dtype; without a kernel a block of it in float32."""
    chunk = LOSS_BYTES if train.device == "cuda" else OTHER_LOSS_BYTES * train.itemsize // 4
    block = 0 if train.kernels else 1 << 20
    return min(train.tokens * shape.vocab_size * train.itemsize, chunk) + block


def _places(shape: Shape, train: TrainShape) -> int:
    """A CPU's layers by hand keep their adapters as products read them too."""
    there = by_hand(shape, train) and train.device == "cpu" and train.itemsize != 4
    return train.trained * train.itemsize if there else 0


def _casts(shape: Shape, train: TrainShape) -> int:
    """Masters as products read them: B scaled in any dtype, A in another than float32."""
    if train.full or by_hand(shape, train) or compiled(shape, train):
        return 0
    both = train.trained * train.itemsize
    return both // 2 if train.itemsize == 4 else both
