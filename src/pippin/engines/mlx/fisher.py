"""X^T X of every linear's inputs where a token counts by what its outputs do to the predictions.

A token's weight is its mean squared gradient over the linear's outputs, of a prediction that the
model itself draws: what an error of the weights costs in divergence, to second order.

Shape letters: N real tokens, D features, O outputs, C tokens of one chunk, V vocabulary.
"""

import contextlib
from collections.abc import Collection, Generator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from numpy.typing import NDArray

from pippin.engines.mlx.attention import packed_attention
from pippin.engines.mlx.body import Head
from pippin.engines.mlx.lora import linear_shape
from pippin.engines.mlx.loss import head_loss
from pippin.engines.mlx.moments import HEAD, linears
from pippin.engines.mlx.probe import run_rows
from pippin.engines.mlx.rows import Rows
from pippin.quantizers.in_turn import outputs_of, spans

TINY = float(np.finfo(np.float32).tiny)


def loss_moments(
    network: nn.Module,
    head: Head,
    batches: Sequence[Rows],
    names: Collection[str] | None,
    seed: int,
) -> dict[str, NDArray[np.float32]]:
    """By linear's name, (D, D) float32: of `names`, or of all; its `outputs_of` as well.

    `seed` draws the predictions.
    """
    watched = {n: m for n, m in linears(network) if n != HEAD and (names is None or n in names)}
    weigher = Weigher()
    with shifting(watched) as shifts:
        for rows, key in zip(batches, keys_of(seed, len(batches)), strict=True):
            run = Drawn(head, rows, key)
            outputs, gradients = _differentiate(network, run, shifts)
            for name, gradient in gradients.items():
                weigher.add(name, run.real(outputs[name]), run.real(gradient))
            if names is None or HEAD in names:
                weigher.add_head(run, outputs[HEAD])
    return weigher.moments()


class Weigher:
    """Sums X^T diag(w) X by linear, and what its outputs weigh together."""

    def __init__(self) -> None:
        self.sums: dict[str, mx.array] = {}

    def add(self, name: str, x_ND: mx.array, g_NO: mx.array) -> None:
        """A linear's inputs, and the gradient of its outputs."""
        weight_N = mx.square(g_NO).mean(-1)
        tamed_N = _add(self.sums, name, x_ND, weight_N)
        _add_outputs(self.sums, name, g_NO, tamed_N / mx.maximum(weight_N, TINY))

    def add_head(self, run: "Drawn", hidden: mx.array) -> None:
        """The gradient of a logit by one is its probability, less one if drawn."""
        _add(self.sums, HEAD, run.real(hidden), run.draw(run.rows_of(hidden))[1])

    def moments(self) -> dict[str, NDArray[np.float32]]:
        """The sums by linear, on the host."""
        return {name: np.array(total) for name, total in self.sums.items()}


class Shifts:
    """Arrays that are added to linears' outputs, and the inputs that they have `seen`."""

    def __init__(self, watched: Mapping[str, Any]) -> None:
        self.watched = watched
        self.seen: dict[str, mx.array] = {}
        self.moved: dict[str, mx.array] = {}

    def zeros(self, rows: Rows) -> dict[str, mx.array]:
        """What a loss is differentiated by."""
        shape, zero = rows.tokens_BT.shape, mx.array(0.0)
        return {
            name: mx.broadcast_to(zero, (*shape, linear_shape(module)[1]))
            for name, module in self.watched.items()
        }


@contextlib.contextmanager
def shifting(watched: Mapping[str, Any]) -> Generator[Shifts]:
    """Inside, `moved` is added to the linears' outputs."""
    shifts, kinds = Shifts(watched), [(module, type(module)) for module in watched.values()]
    try:
        for name, module in watched.items():
            module.__class__ = _moved(type(module), name, shifts)
        yield shifts
    finally:
        shifts.seen, shifts.moved = {}, {}  # or the classes would hold them for a while
        for module, kind in kinds:
            module.__class__ = kind


def keys_of(seed: int, batches: int) -> list[mx.array]:
    """What each batch's predictions are drawn with."""
    return list(mx.random.split(mx.random.key(seed), batches))


class Drawn:
    """One batch's predictions, drawn with `key`."""

    def __init__(self, head: Head, rows: Rows, key: mx.array) -> None:
        self.head, self.rows, self.key = head, rows, key

    def real(self, values: mx.array) -> mx.array:
        """(N, ...) in float32, without padding."""
        return self.rows_of(values).astype(mx.float32)

    def rows_of(self, values: mx.array) -> mx.array:
        """(N, ...) without padding."""
        return values.reshape(-1, values.shape[-1])[self.rows.real_N]

    def loss(self, hidden: mx.array) -> mx.array:
        """Of the drawn tokens, summed."""
        hidden_ND = self.rows_of(hidden)
        targets_N = self.draw(mx.stop_gradient(hidden_ND))[0]
        return head_loss(hidden_ND, targets_N, self.head, head_trained=False)

    def draw(self, hidden_ND: mx.array) -> tuple[mx.array, mx.array]:
        """A next token for every hidden state, and the weight of the logits there."""
        parts = []
        for start in range(0, len(hidden_ND), self.head.chunk):
            logits_CV = self.head.logits(hidden_ND[start : start + self.head.chunk])
            part = draw(logits_CV, mx.random.split(self.key, start + 2)[start + 1])
            parts.append(part)
        return mx.concatenate([p[0] for p in parts]), mx.concatenate([p[1] for p in parts])


def _differentiate(
    network: nn.Module, run: Drawn, shifts: Shifts
) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """Inputs by linear with the hidden states under HEAD, and gradients of the outputs."""

    def loss(moved: dict[str, mx.array]) -> tuple[mx.array, dict[str, mx.array]]:
        shifts.moved = moved
        hidden = run_rows(network, run.rows)
        return run.loss(hidden), {**shifts.seen, HEAD: hidden}

    with packed_attention(network):
        (total, inputs), gradients = mx.value_and_grad(loss)(shifts.zeros(run.rows))
    mx.eval(total, inputs, gradients)
    return inputs, gradients


def draw(logits_CV: mx.array, key: mx.array) -> tuple[mx.array, mx.array]:
    """A token of every row's distribution, and the mean square of the loss's gradient there."""
    p_CV = mx.softmax(logits_CV, axis=-1, precise=True)
    token_C = mx.random.categorical(logits_CV, axis=-1, key=key)
    chance_C = mx.take_along_axis(p_CV, token_C[:, None], axis=-1)[:, 0]
    square_C = mx.square(p_CV).sum(-1) - 2 * chance_C + 1
    return token_C, square_C / p_CV.shape[1]


def _moved(kind: Any, name: str, shifts: Shifts) -> type:
    class Moved(kind):
        def __call__(self, x: mx.array) -> mx.array:
            shifts.seen[name] = x
            y = super().__call__(x)
            return y + shifts.moved[name].astype(y.dtype)

    return Moved


def _add(sums: dict[str, mx.array], name: str, x_ND: mx.array, weight_N: mx.array) -> mx.array:
    """One drawn prediction says little about a token: weights go halfway to their mean.

    Halfway in the logarithm, which tames the few that are a hundred times the others. Returns the
    weights that were used.
    """
    root_N = mx.sqrt(weight_N)
    root_N = root_N * (weight_N.mean() / mx.maximum(root_N.mean(), TINY))
    _sum(sums, name, _square(x_ND, root_N))
    return root_N


def _add_outputs(sums: dict[str, mx.array], name: str, g_NO: mx.array, weight_N: mx.array) -> None:
    """Every span's square, on the left of its rows."""
    parts = spans(g_NO.shape[1])
    width = parts[0].stop
    squares = [_square(g_NO[:, span], weight_N) for span in parts]
    wide = [mx.pad(square, [(0, 0), (0, width - len(square))]) for square in squares]
    _sum(sums, outputs_of(name), mx.concatenate(wide))


def _square(x_ND: mx.array, weight_N: mx.array) -> mx.array:
    scaled_ND = x_ND * mx.sqrt(weight_N)[:, None]
    return scaled_ND.T @ scaled_ND


def _sum(sums: dict[str, mx.array], name: str, part: mx.array) -> None:
    sums[name] = sums[name] + part if name in sums else part
    mx.eval(sums[name])
