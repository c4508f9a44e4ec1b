"""What training holds at its high points: arithmetic over a model's shape, no framework.

An update is high four times: at the loss, where a chunk of logits stands beside all that layers
keep; in the last layer's backward; at its end, where every gradient is there; and in the step of
the optimizer. On a CPU a checkpoint copies masters and moments besides.

Letters: n tokens at once, D hidden, F feed-forward, H heads, C channels of a head, Q and K all
channels of queries and of keys, V vocabulary, R rank, E a frame's width, b bytes of an element.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from pippin import memory
from pippin.memory import LINEARS

LOSS_BYTES = {"cuda": 96 << 20}  # logits that exist at once (engines/torch/loss.py)
OTHER_LOSS_BYTES = 64 << 20  # the same in float32, elsewhere
LARGE = 4 << 20  # bytes; larger blocks go back to the system (engines/host.py)
PACKED_GROUPS = (32, 64, 128, 256)  # of 4-bit codes that the CPU's kernel takes


class Shape(memory.Shape, Protocol):
    """What decides besides which parts a layer has."""

    @property
    def model_type(self) -> str: ...
    @property
    def sliding_window(self) -> int | None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How a layer differs from Llama's.

    `after`: norms behind attention and feed-forward; `heads`: norms of queries and keys; `own`:
    norms in float32 and a gate that is not SiLU, which pippin leaves as they are; `biased`: query,
    key and value have biases.
    """

    after: bool = False
    heads: bool = False
    own: bool = False
    biased: bool = False


FAMILIES = {
    "gemma2": Family(after=True, own=True),
    "gemma3_text": Family(after=True, heads=True, own=True),
    "qwen2": Family(biased=True),
    "qwen3": Family(heads=True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainShape:
    """What an update computes, and how: `tokens` at once, samples of up to `longest`.

    `trained` counts trainable parameters; `adapted` are the last names of the linears with an
    adapter of `rank`, none in full fine-tuning; `gained` counts the outputs, in all layers, that
    DoRA rescales. `packed` is the group of 4-bit codes that linears are kept in, 0 for dense ones.
    `checkpointing` is the share of the layers that are computed again.
    `accumulates` tells that gradients of an earlier micro-batch are there. `device` is where
    PyTorch computes, empty for another engine.
    """

    device: str
    tokens: int
    longest: int
    itemsize: int
    trained: int
    checkpointing: float
    adapted: frozenset[str] = frozenset()
    rank: int = 0
    gained: int = 0
    packed: int = 0
    accumulates: bool = False

    @property
    def full(self) -> bool:
        """Whether every weight is trained."""
        return not self.adapted


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainBytes:
    """Where training's memory goes: what stays, then what each high point adds to it.

    `small` is what layers keep in blocks that a CPU's allocator does not give back one by one.
    """

    weights: int
    masters: int
    moments: int
    gradients: int
    kept: int
    at_loss: int
    in_backward: int
    at_end: int
    in_update: int
    in_checkpoint: int
    small: int

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
        return self.weights + self.masters + self.moments + self.high


def train_bytes(shape: Shape, train: TrainShape) -> TrainBytes:
    """Tensors alone: what a framework and an allocator add is not in it."""
    t, b = train.trained, train.itemsize
    table = shape.vocab_size * shape.hidden_size
    tensors, ends = layer_kept(shape, train), train.tokens * b * shape.hidden_size
    layer = sum(tensors)
    early = 4 * t if train.adapted or train.accumulates else 0  # gradients before the backward ends
    again = math.ceil(train.checkpointing * shape.num_layers)  # only their inputs are kept
    kept = again * ends + (shape.num_layers - again) * layer
    fresh = layer if again == shape.num_layers else 0  # else a kept one is gone by then
    blocks = [ends] * again + tensors * max(1, shape.num_layers - again)
    head = table * b if train.full else 0
    return TrainBytes(
        weights=weight_bytes(shape, train),
        masters=0 if train.full and b == 4 else 4 * t,
        moments=8 * t,
        gradients=4 * t,
        kept=kept + _casts(train) + early,
        at_loss=3 * ends + _loss(shape, train) + (4 * table + head if train.full else 0),
        in_backward=3 * ends + fresh + head + _backward(shape, train),
        at_end=(layer + 2 * head) if train.full else 0,
        in_update=4 * memory.largest_tensor(shape) if train.full else 0,
        in_checkpoint=12 * t if train.device == "cpu" else 0,
        small=sum(block for block in blocks if block < LARGE),
    )


def layer_kept(shape: Shape, train: TrainShape) -> list[int]:
    """Bytes of every tensor that one layer keeps for its backward.

    Two norms keep input and output (4D), attention query, key, value and output (2Q + 2K), the
    feed-forward gate, up and their product (3F), an adapter its narrow product (R). Norms in
    float32 keep a copy of their input in it, trained ones the normed values too; a gate of another
    kind keeps its own value (F).
    """
    if compiled(shape, train):
        return [train.tokens * _compiled_kept(shape, train)]
    b, d, f = train.itemsize, shape.hidden_size, shape.intermediate_size
    q, k = _widths(shape)
    family, wide = _family(shape), _norm_kept(shape, train)
    a_token = [d * wide, d * b] * 2 + [q * b, k * b] * 2
    a_token += [d * wide] * 2 if family.after else []
    a_token += [q * wide, k * wide] if family.heads else []
    a_token += [f * b] * (4 if family.own or train.packed else 3)
    narrow = _framed(shape, train) if by_hand(shape, train) else _narrow(train)
    a_token += [b * narrow, b * train.gained // shape.num_layers, _rates(shape, family)]
    return [train.tokens * each for each in (*a_token, _scores(shape, train))]


def by_hand(shape: Shape, train: TrainShape) -> bool:
    """Whether layers run as engines/torch/layer.py."""
    family = _family(shape)
    plain = not (family.own or family.heads or train.gained)
    return train.device == "cuda" and plain and not train.full


def compiled(shape: Shape, train: TrainShape) -> bool:
    """Whether layers run through torch.compile."""
    return train.device == "cuda" and not by_hand(shape, train)


def weight_bytes(shape: Shape, train: TrainShape) -> int:
    """Of all weights: in b bytes, in frames where layers run by hand, or in codes."""
    b = train.itemsize
    linears = sum(i * o for i, o in memory.linear_shapes(shape).values())
    rest = memory.parameters(shape) - shape.num_layers * linears
    layer = linears * b
    if by_hand(shape, train):
        unit = 128 // b
        layer = sum(b * (o + e) * (-(-(i + e) // unit) * unit) for i, o, e in _frames(shape, train))
    elif train.packed:
        layer = linears // 2 + linears // train.packed * 8  # scale and bias twice, in two bytes
    return rest * b + shape.num_layers * layer


def _compiled_kept(shape: Shape, train: TrainShape) -> int:
    """The compiler keeps products and computes what lies between them again."""
    q, k = _widths(shape)
    channels = 2 * shape.hidden_size + 2 * q + 2 * k + 2 * shape.intermediate_size
    return train.tokens * (train.itemsize * (channels + _narrow(train)) + 4 * shape.num_heads)


def _norm_kept(shape: Shape, train: TrainShape) -> int:
    """Bytes a channel that a norm keeps besides its output."""
    own, b = _family(shape).own, train.itemsize
    if not train.full:
        return 4 if own else b
    return 8 if own else 4 + b


def _rates(shape: Shape, family: Family) -> int:
    """Bytes a token: one float32 a norm and a head's softmax."""
    norms = 4 if family.after else 2
    return 4 * (norms + shape.num_heads + family.heads * (shape.num_heads + shape.num_kv_heads))


def _scores(shape: Shape, train: TrainShape) -> int:
    """Bytes a token: PyTorch's attention on MPS keeps all weights once gradients are wanted.

    It computes in float32: a row of weights a head, scaled query, and key and value a query head.
    """
    if train.device != "mps":
        return 0
    return 4 * (shape.num_heads * train.longest + 3 * _widths(shape)[0])


def _backward(shape: Shape, train: TrainShape) -> int:
    """What the last layer's backward makes while all is still kept, bytes."""
    n, b, d, f = train.tokens, train.itemsize, shape.hidden_size, shape.intermediate_size
    q, k = _widths(shape)
    if by_hand(shape, train):
        return n * b * (3 * f + 5 * d + 2 * q + 2 * k + _framed(shape, train))
    dense = 10 * memory.largest_linear(shape) if train.packed else 0
    scores = 8 * shape.num_heads * train.longest**2 if train.device == "mps" else 0
    return max(n * b * (3 * f + d), scores) + dense


def _loss(shape: Shape, train: TrainShape) -> int:
    """A chunk of logits in the model's dtype."""
    rows = LOSS_BYTES.get(train.device, OTHER_LOSS_BYTES * train.itemsize // 4)
    return min(train.tokens * shape.vocab_size * train.itemsize, rows)


def _casts(train: TrainShape) -> int:
    """Masters as products read them: B scaled in any dtype, A in another than float32."""
    if train.device == "cuda":
        return 0
    both = train.trained * train.itemsize
    return (both // 2 if train.itemsize == 4 else both) if train.adapted else 0


def _frames(shape: Shape, train: TrainShape) -> list[tuple[int, int, int]]:
    """(inputs, outputs, width) of the products that engines/torch/frames.py joins."""
    d, f = shape.hidden_size, shape.intermediate_size
    q, k = _widths(shape)
    bias = _family(shape).biased
    return [
        (d, q + 2 * k, _frame(LINEARS[:3], train, bias)),
        (q, d, _frame(LINEARS[3:4], train)),
        (d, 2 * f, _frame(LINEARS[4:6], train)),
        (f, d, _frame(LINEARS[6:], train)),
    ]


def _frame(names: Iterable[str], train: TrainShape, bias: bool = False) -> int:
    ranks = sum(train.rank for name in names if name in train.adapted)
    return -(-(ranks + bias) // 16) * 16


def _framed(shape: Shape, train: TrainShape) -> int:
    return sum(width for _, _, width in _frames(shape, train))


def _narrow(train: TrainShape) -> int:
    return train.rank * len(train.adapted)


def _widths(shape: Shape) -> tuple[int, int]:
    return shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim


def _family(shape: Shape) -> Family:
    return FAMILIES.get(shape.model_type, Family())
