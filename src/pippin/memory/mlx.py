"""What training in MLX holds at its high points: arithmetic over a model's shape, no framework.

Read off `mx.get_peak_memory()` on a CPU, which a test compares with; for a GPU off one run of 3B
parameters (benchmarks/results, mlx-w1-bf16).

Letters: n tokens at once, D hidden, F feed-forward, H heads, V vocabulary, b bytes of an element.
"""

from dataclasses import replace

from pippin.memory.layers import Shape, TrainShape, family_of, narrow, widths
from pippin.memory.training import TrainBytes, weight_bytes

CHUNK = 64 << 20  # logits in float32 that exist at once (engines/mlx/body.py)
CPU_CHUNK, LEAST = 8 << 20, 16  # on a CPU, and of how many tokens at least (engines/mlx/loss.py)
BUSY = 256  # tokens that a CPU computes at once, in whole samples
SLOTS = 2.4  # of a GPU's copies, in lengths that are rounded up: samples of 216 tokens on average


def mlx_bytes(shape: Shape, train: TrainShape) -> TrainBytes:
    """All arrays at once, in MLX's own count."""
    t, n, count = train.trained, at_once(train), shape.num_layers
    ends, layer = n * train.itemsize * shape.hidden_size, n * _kept(shape, train)
    cut = n < train.tokens or train.accumulates
    early = 4 * t if cut else 0  # gradients of the parts before
    casts = train.itemsize * t if train.itemsize < 4 or train.adapted else 0
    weights = 0 if train.full and train.itemsize == 4 else weight_bytes(shape, train)
    wide = weight_bytes(shape, replace(train, packed=0.0)) if train.device == "cpu" else 0
    return TrainBytes(
        weights=weights,
        masters=4 * t,
        moments=8 * t,
        gradients=4 * t,
        at_start=max(0, wide - weights),  # while they are loaded
        kept=count * (ends if train.checkpointing else layer) + early + casts,
        at_loss=_loss(shape, train, n) + 3 * ends,
        in_backward=4 * t + _backward(shape, train, n),
        at_end=0,
        in_update=12 * t,
        in_checkpoint=12 * t if train.device == "cpu" else 0,
        holes=0,
    )


def at_once(train: TrainShape) -> int:
    """Tokens: on a CPU samples are computed in parts of at least `BUSY`."""
    if train.device != "cpu":
        return train.tokens
    return min(train.tokens, -(-BUSY // train.longest) * train.longest)


def _kept(shape: Shape, train: TrainShape) -> int:
    """Bytes a token: norms and residuals 5D, attention, gate, up and product 3F, narrow products.

    Attention keeps query, key, value and output, on a GPU twice: packed, and in slots. On a CPU it
    keeps the scaled query and a row of weights a head. A gate that is not SiLU keeps 4F more.
    """
    q, k = widths(shape)
    d, family = shape.hidden_size, family_of(shape)
    a_token = 5 * d + 2 * q + 2 * k + 3 * shape.intermediate_size + narrow(train)
    a_token += 2 * d * family.after + (q + k) * family.heads
    a_token += 4 * shape.intermediate_size * family.own
    if train.device == "cpu":
        a_token += q + shape.num_heads * train.longest
    else:
        a_token += int(SLOTS * (2 * q + 2 * k))
    return train.itemsize * a_token


def _backward(shape: Shape, train: TrainShape, n: int) -> int:
    """What a layer's backward makes, and its forward again where it is recomputed.

    Metal is taken to have no fused backward of attention: nobody has measured it.
    """
    d, f, scores = shape.hidden_size, shape.intermediate_size, shape.num_heads * train.longest
    if train.device != "cpu":
        again = n * _kept(shape, train) if train.checkpointing else 0
        plain = 3 * scores if train.device == "mps" else 0
        return n * train.itemsize * (3 * f + d + plain) + again
    made = 6 * f + 11 * scores + 9 * d if train.checkpointing else 9 * f + 4 * scores + 3 * d
    return n * train.itemsize * made


def _loss(shape: Shape, train: TrainShape, n: int) -> int:
    """A chunk of logits: products, logits, gradient."""
    most = max(CPU_CHUNK, LEAST * 4 * shape.vocab_size) if train.device == "cpu" else CHUNK
    chunk = min(most, 4 * n * shape.vocab_size)
    head = 8 * shape.vocab_size * shape.hidden_size if train.full else 0
    return 3 * chunk + head
