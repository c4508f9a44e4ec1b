"""What a decoder layer keeps for its backward: bytes over a model's shape, no framework.

Letters: n tokens at once, D hidden, F feed-forward, H heads, C channels of a head, Q and K all
channels of queries and of keys, R rank, E a frame's width, b bytes of an element.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from pippin import memory
from pippin.memory import LINEARS, linear_shapes


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
    """What an update computes, and how: `tokens` at once in rows of `row`, samples of `longest`.

    `trained` counts trainable parameters; `adapted` are the last names of the linears with an
    adapter of `rank`, none in full fine-tuning; `gained` counts the outputs, in all layers, that
    DoRA rescales. `packed` are bytes of a linear's weight that is kept in codes, 0 for dense ones.
    `checkpointing` is the share of the layers that are computed again.
    `accumulates` tells that gradients of an earlier micro-batch are there. `math` is attention in
    plain products; `compile` allows torch.compile; `dropout` tells that adapters drop inputs.
    `kernels` tells that layers can run by hand on the device.
    """

    device: str
    tokens: int
    row: int
    longest: int
    itemsize: int
    trained: int
    checkpointing: float
    adapted: frozenset[str] = frozenset()
    rank: int = 0
    gained: int = 0
    packed: float = 0.0
    accumulates: bool = False
    math: bool = False
    compile: bool = True
    dropout: bool = False
    kernels: bool = True

    @property
    def full(self) -> bool:
        """Whether every weight is trained."""
        return not self.adapted


def layer_kept(shape: Shape, train: TrainShape) -> list[int]:
    """Bytes of every tensor that one layer keeps for its backward.

    Two norms keep input and output (4D), attention query, key, value and output (2Q + 2K), the
    feed-forward gate, up and their product (3F), an adapter its narrow product (R). Norms in
    float32 keep a copy of their input in it, trained ones the normed values too; a gate of another
    kind keeps its own value (F).
    """
    if by_hand(shape, train):
        return (_framed_kept if train.device == "cuda" else _by_hand_kept)(shape, train)
    return _compiled_kept(shape, train) if compiled(shape, train) else plain_kept(shape, train)


def plain_kept(shape: Shape, train: TrainShape) -> list[int]:
    """Of autograd, norms and gates being ours where they can be."""
    b, d, f = train.itemsize, shape.hidden_size, shape.intermediate_size
    q, k = widths(shape)
    family, wide = family_of(shape), _norm_kept(shape, train)
    a_token = [d * wide, d * b] * 2 + [q * b, k * b] * 2
    a_token += [d * wide] * 2 if family.after else []
    a_token += [q * wide, k * wide] if family.heads else []
    a_token += [f * b] * (4 if family.own or train.packed else 3)
    a_token += [inputs for inputs, _ in _adapted(shape, train)] if train.dropout else []
    a_token += [b * narrow(train), b * train.gained // shape.num_layers, _rates(shape, family)]
    return [train.tokens * each for each in (*a_token, _scores(shape, train))]


def by_hand(shape: Shape, train: TrainShape) -> bool:
    """Whether layers run as engines/torch/layer.py or, on a CPU, cpu_layer.py."""
    family = family_of(shape)
    other = family.own or family.heads or train.gained or train.packed or train.math
    there = train.kernels and train.device in ("cuda", "cpu")
    return there and not (other or train.dropout or train.full)


def compiled(shape: Shape, train: TrainShape) -> bool:
    """Whether layers run through torch.compile."""
    allowed = train.device == "cuda" and train.compile and not train.math
    return allowed and not by_hand(shape, train)


def _by_hand_kept(shape: Shape, train: TrainShape) -> list[int]:
    """Of engines/torch/cpu_layer.py: norms and the gated product are made again."""
    d, f, (q, k) = shape.hidden_size, shape.intermediate_size, widths(shape)
    channels = [d, q, k, k, q, d, f, f, narrow(train)]
    return [train.tokens * train.itemsize * each for each in channels]


def _framed_kept(shape: Shape, train: TrainShape) -> list[int]:
    """Of engines/torch/layer.py: its inputs in rows with room for the frame beside them.

    Where adapters stand on both sides of the gate, its product is made again (`tiled`).
    """
    n, b, d, f = train.tokens, train.itemsize, shape.hidden_size, shape.intermediate_size
    q, k = widths(shape)
    kqv, o, both, down = (width for _, _, width in frames(shape, train))
    tiled = both > 0 and down > 0
    channels = [roomy(d + down, b) if tiled else d, q + 2 * k, roomy(q + o, b), d, 2 * f]
    channels += [roomy(d + kqv, b) if kqv else 0, roomy(d + both, b) if both else 0]
    channels += [down if tiled or not down else roomy(f + down, b)]
    return [n * b * each for each in channels] + [n * _rates(shape, Family())]


def _compiled_kept(shape: Shape, train: TrainShape) -> list[int]:
    """Of torch.compile, fitted to runs: products are kept (4F), norms mostly computed again.

    Over codes the frozen product and the adapter's stand apart.
    """
    family, (q, k) = family_of(shape), widths(shape)
    hidden = 1.35 + family.after * (1.35 if train.full else 0.95)
    forward = 4 + 0.92 * (train.packed > 0)
    channels = int(hidden * shape.hidden_size + forward * shape.intermediate_size)
    channels += 2 * q + 2 * k + family.heads * (q + k) + narrow(train)
    return [train.tokens * (train.itemsize * channels + 4 * shape.num_heads)]


def _norm_kept(shape: Shape, train: TrainShape) -> int:
    """Bytes a channel that a norm keeps besides its output."""
    own, b = family_of(shape).own, train.itemsize
    if not train.full:
        return 4 if own else b
    return 8 if own else 4 + b


def _rates(shape: Shape, family: Family) -> int:
    """Bytes a token: one float32 a norm and a head's softmax."""
    norms = 4 if family.after else 2
    return 4 * (norms + shape.num_heads + family.heads * (shape.num_heads + shape.num_kv_heads))


def _scores(shape: Shape, train: TrainShape) -> int:
    """Bytes a token of attention that keeps a row of weights a head once gradients are wanted.

    PyTorch's on MPS computes in float32: weights, scaled query, and key and value a query head.
    Plain products keep weights in float32 and in the model's dtype, the mask, and key and value a
    query head in the place of their own.
    """
    b, (q, k), weights = train.itemsize, widths(shape), shape.num_heads * train.longest
    if train.math:
        return weights * (4 if b == 4 else 4 + b) + train.longest + 2 * b * (q - k)
    return 4 * (weights + 3 * q) if train.device == "mps" else 0


def frames(shape: Shape, train: TrainShape) -> list[tuple[int, int, int]]:
    """(inputs, outputs, width) of the products that engines/torch/frames.py joins."""
    d, f = shape.hidden_size, shape.intermediate_size
    q, k = widths(shape)
    bias = family_of(shape).biased
    return [
        (d, q + 2 * k, _frame(LINEARS[:3], train, bias)),
        (q, d, _frame(LINEARS[3:4], train)),
        (d, 2 * f, _frame(LINEARS[4:6], train)),
        (f, d, _frame(LINEARS[6:], train)),
    ]


def _frame(names: Iterable[str], train: TrainShape, bias: bool = False) -> int:
    ranks = sum(train.rank for name in names if name in train.adapted)
    return -(-(ranks + bias) // 16) * 16


def roomy(columns: int, itemsize: int) -> int:
    """Rows begin at multiples of 128 bytes."""
    unit = 128 // itemsize
    return -(-columns // unit) * unit


def narrow(train: TrainShape) -> int:
    """Ranks of all adapters of a layer."""
    return train.rank * len(train.adapted)


def _adapted(shape: Shape, train: TrainShape) -> list[tuple[int, int]]:
    """(inputs, outputs) of a layer's linears with an adapter."""
    return [size for name, size in linear_shapes(shape).items() if name in train.adapted]


def widths(shape: Shape) -> tuple[int, int]:
    """All channels of queries, and of keys."""
    return shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim


def family_of(shape: Shape) -> Family:
    """How its layers differ from Llama's."""
    return FAMILIES.get(shape.model_type, Family())
