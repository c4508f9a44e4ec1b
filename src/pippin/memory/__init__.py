"""Bytes each stage needs: arithmetic over a model's shape, no framework, no model in memory.

Every function gives bytes (or counts, where it says so) and the formula behind them. Letters: L
layers, D hidden, F feed-forward, H heads, K kv heads, C head channels, V vocabulary, R rank,
n tokens computed at once, b bytes of an element.
"""

from collections.abc import Iterable
from typing import Protocol

# Families whose layers PyTorch calibrates in turn: each is called with what the one before it gave.
LAYERED = ("gemma3_text", "llama", "mistral", "qwen2", "qwen3")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LOSS_CHUNK = 2**26  # float32 logits that exist at once, whatever the length of the batch
MOMENTS = 2 << 30  # float32 sums X^T X that exist at once: a model with more is read again
SPAN = 2048  # outputs of a linear whose errors are weighed together, at most
# Operations a weight that recomputed layers add: 1.2 for 3B parameters on an H200 (8.6k and 6.6k
# tokens a second), 1.5 for 135M on one CPU thread (1.81 and 2.51 s a step of 512 tokens).
AGAIN = 1.4
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Shape(Protocol):
    """What the arithmetic needs to know of a model; ModelConfig has it."""

    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def tied_embeddings(self) -> bool: ...


def linear_shapes(shape: Shape) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of the seven linears of one layer of the Llama family."""
    d, f = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes = ((d, q), (d, kv), (d, kv), (q, d), (d, f), (d, f), (f, d))
    return dict(zip(LINEARS, sizes, strict=True))


def parameters(shape: Shape) -> int:
    """Count: L (D(2HC + 2KC) + 3DF + 2D) + VD (twice when untied) + D."""
    layer = sum(i * o for i, o in linear_shapes(shape).values()) + 2 * shape.hidden_size
    embedding = shape.vocab_size * shape.hidden_size * (1 if shape.tied_embeddings else 2)
    return shape.num_layers * layer + embedding + shape.hidden_size


def linear_parameters(shape: Shape) -> int:
    """Count of the layers' linears alone."""
    return shape.num_layers * sum(i * o for i, o in linear_shapes(shape).values())


def adapter_parameters(linears: Iterable[tuple[int, int]], rank: int, dora: bool = False) -> int:
    """Count: R (inputs + outputs) of every adapted linear, and outputs more for DoRA."""
    return sum(rank * (inputs + outputs) + dora * outputs for inputs, outputs in linears)


def operations(method: str, recomputed: float) -> float:
    """Count, a weight and token trained on: 4 for an adapter, 6 for all weights, and AGAIN."""
    return (4 if method == "lora" else 6) + AGAIN * recomputed


def layer_activations(shape: Shape, tokens: int, itemsize: int) -> int:
    """Kept by one layer for its backward: n b (6D + 2HC + 2KC + 4F), and n (4H + 8).

    Two norms keep input, normalised input and output (6D, what the adapters read among it);
    attention keeps q, k, v and its output (2HC + 2KC); the feed-forward keeps gate, silu(gate), up
    and their product (4F). The softmax keeps a float32 per head, the norms one each.
    """
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    wide = 6 * shape.hidden_size + 2 * q + 2 * kv + 4 * shape.intermediate_size
    return tokens * (itemsize * wide + 4 * shape.num_heads + 8)


def activations(shape: Shape, tokens: int, itemsize: int) -> int:
    """All layers' at once: L x layer. Embedding output and final norm add 4 n b D."""
    layer = layer_activations(shape, tokens, itemsize)
    return shape.num_layers * layer + 4 * tokens * itemsize * shape.hidden_size


def loss_bytes(shape: Shape, tokens: int, itemsize: int) -> int:
    """Chunked cross-entropy: logits in float32, their copy in the model's dtype, in one chunk.

    min(n V 4, chunk) (1 + b/4), and the gradient of the hidden states n b D. The full n x V tensor
    never exists.
    """
    chunk = min(tokens * shape.vocab_size * 4, LOSS_CHUNK)
    return chunk + chunk * itemsize // 4 + tokens * itemsize * shape.hidden_size


def cache_bytes(shape: Shape, rows: int, tokens: int, itemsize: int) -> int:
    """Keys and values of `rows` conversations of `tokens`: 2 L rows tokens KC b."""
    kv = shape.num_kv_heads * shape.head_dim
    return 2 * shape.num_layers * rows * tokens * kv * itemsize


def evaluate_bytes(shape: Shape, rows: int, tokens: int, itemsize: int) -> int:
    """Weights, one layer's activations of a batch, one chunk of logits, the cache of the answers.

    P b + layer(rows x tokens) + 2 chunk + cache(rows, tokens).
    """
    weights = parameters(shape) * itemsize
    layer = layer_activations(shape, rows * tokens, itemsize)
    chunk = min(rows * tokens * shape.vocab_size * 4, LOSS_CHUNK)
    return weights + layer + 2 * chunk + cache_bytes(shape, rows, tokens, itemsize)


def largest_linear(shape: Shape) -> int:
    """Elements of the largest linear's matrix."""
    return max(i * o for i, o in linear_shapes(shape).values())


def largest_tensor(shape: Shape) -> int:
    """Elements of the largest matrix: the embedding, or a linear."""
    return max(shape.vocab_size * shape.hidden_size, largest_linear(shape))


def codes_bytes(shape: Shape, tokens: int, itemsize: int, trains: tuple[int, bool]) -> int:
    """Training on codes: a byte each, embedding dense, 36 bytes a trained value, activations.

    One linear is made dense beside its gradient, 12 bytes a weight. `trains` counts those values,
    and tells whether all layers are computed again.
    """
    trained, again = trains
    linears = linear_parameters(shape)
    held = linears + itemsize * (parameters(shape) - linears) + 36 * trained
    layers = 1 if again else shape.num_layers
    held += layers * layer_activations(shape, tokens, itemsize)
    return held + loss_bytes(shape, tokens, itemsize) + 12 * largest_linear(shape)


def merge_bytes(shape: Shape, itemsize: int) -> int:
    """One tensor as stored, in float32, its delta in float32, and the result: E (2b + 8)."""
    return largest_tensor(shape) * (2 * itemsize + 8)


def quantize_bytes(shape: Shape, itemsize: int) -> int:
    """One tensor as stored, in float32, scaled, its codes, its values again: E (b + 13)."""
    return largest_tensor(shape) * (itemsize + 13)


def calibrate_bytes(shape: Shape, itemsize: int, tokens: int) -> int:
    """Weights, their moments, one layer's activations, and the widest Hessian being made ready.

    P b + min(moments, MOMENTS) + layer(n) + 8 I^2 + 5120 I: the Hessian scaled and its factor in
    float32, and five blocks of 128 rows of it in float64 meanwhile.
    """
    moments = min(moment_bytes(shape), MOMENTS)
    layer = layer_activations(shape, tokens, itemsize)
    return parameters(shape) * itemsize + moments + layer + _ready(shape)


def layered_bytes(shape: Shape, itemsize: int, tokens: tuple[int, int]) -> int:
    """The same where layers are read in turn: `tokens` of a batch, and of all batches.

    Embedding, head, one layer and its moments, all tokens' hidden states, 8 I^2 + 5120 I.
    """
    layer = sum(i * o for i, o in linear_shapes(shape).values())
    tables = shape.vocab_size * shape.hidden_size * (1 if shape.tied_embeddings else 2)
    held = (layer + tables + tokens[1] * shape.hidden_size) * itemsize
    moments = moment_bytes(shape) // shape.num_layers
    return held + moments + layer_activations(shape, tokens[0], itemsize) + _ready(shape)


def moment_bytes(shape: Shape) -> int:
    """Float32 sums of all linears' inputs and outputs: L times the sum of `linear_moments`."""
    return shape.num_layers * sum(linear_moments(*s) for s in linear_shapes(shape).values())


def linear_moments(inputs: int, outputs: int) -> int:
    """X^T X of the inputs, and as much of the outputs' as is weighed together: 4 (I^2 + O S)."""
    return 4 * (inputs**2 + outputs * min(outputs, SPAN))


def _ready(shape: Shape) -> int:
    inputs = max(i for i, _ in linear_shapes(shape).values())
    return 8 * inputs**2 + 5120 * inputs


def quantized_size(shape: Shape, grids: tuple[tuple[int, int], tuple[int, int]]) -> int:
    """Bytes on disk for ((bits, group) of the linears, (bits, group) of embedding and head).

    Each weight costs bits/8, each group a scale and a bias of two bytes; norms stay in two. Group
    0 is one group a row, bits of 16 leave a tensor as it is.
    """
    linears, embeds = grids
    layer = sum(_packed(i, o, *linears) for i, o in linear_shapes(shape).values())
    tables = 1 if shape.tied_embeddings else 2
    embedding = _packed(shape.hidden_size, shape.vocab_size, *embeds) * tables
    norms = 2 * (2 * shape.num_layers + 1) * shape.hidden_size
    return shape.num_layers * layer + embedding + norms


def _packed(inputs: int, outputs: int, bits: int, group: int) -> int:
    if bits == 16:
        return 2 * inputs * outputs
    groups = -(-inputs // group) if group else 1
    return outputs * (-(-inputs * bits // 8) + 4 * groups)
