"""What training in JAX holds at its high points: arithmetic over a model's shape, no framework.

XLA plans one buffer for all that a step makes; its own count is `compiled.memory_analysis()`, which
the constants here were read off and a test compares with.

Letters: n tokens at once, D hidden, F feed-forward, H heads, V vocabulary, b bytes of an element.
"""

from pippin.memory.layers import Shape, TrainShape, family_of, narrow, widths
from pippin.memory.training import TrainBytes, weight_bytes

CHUNK = 32 << 20  # logits in float32 that exist at once (engines/jax/loss.py)
BLOCK, BLOCKS = 128, 8  # fewest queries whose scores exist at once, most blocks of a row


def jax_bytes(shape: Shape, train: TrainShape) -> TrainBytes:
    """All buffers of a step, its arguments among them.

    A layer keeps its input, its linears' sums and attention's result; with checkpointing its input.
    A micro-batch's gradients stand beside their sum. Full fine-tuning in two bytes casts masters.
    """
    t, count = train.trained, shape.num_layers
    b = 4 if train.device == "cpu" else train.itemsize  # XLA widens what a CPU cannot multiply
    ends, layer = train.tokens * b * shape.hidden_size, train.tokens * b * _kept(shape, train)
    casts = train.itemsize * t if train.full and train.itemsize < 4 else 0
    return TrainBytes(
        weights=0 if train.full else weight_bytes(shape, train),
        masters=4 * t,
        moments=8 * t,
        gradients=4 * t,
        at_start=0,
        kept=count * (ends if train.checkpointing else layer) + 8 * t + casts,
        at_loss=2 * min(CHUNK, 4 * train.tokens * shape.vocab_size) + 3 * ends,
        in_backward=_backward(shape, train, b) + (int(1.2 * layer) if train.checkpointing else 0),
        at_end=0,
        in_update=0,
        in_checkpoint=12 * t if train.device == "cpu" else 0,
        holes=0,
    )


def _kept(shape: Shape, train: TrainShape) -> int:
    """Channels: x, query, key and value, attended, what o, gate and up give, narrow products."""
    q, k = widths(shape)
    after = shape.hidden_size if family_of(shape).after else 0  # a norm reads what down gives
    return 2 * shape.hidden_size + 2 * (q + k + shape.intermediate_size) + after + narrow(train)


def _backward(shape: Shape, train: TrainShape, b: int) -> int:
    """What a layer's backward makes; on a CPU scores of a block of queries besides, twice."""
    n, d, f = train.tokens, shape.hidden_size, shape.intermediate_size
    scores = 8 * shape.num_heads * max(BLOCK, train.row // BLOCKS) * n
    return n * b * (8 * f + 7 * d) + (scores if train.device == "cpu" else 0)
