"""Training on one device: packed rows, loss on scored positions, one compiled step an update.

Shape letters: M micro-batches, B rows, T tokens, S scored positions, D hidden.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh

from pippin.data.batches import Batch
from pippin.engines import StepResult, Weights
from pippin.engines.books import Books, scored_tokens
from pippin.engines.jax.architecture import Spec
from pippin.engines.jax.attention import has_cudnn
from pippin.engines.jax.decoder import How, Net, Params, Rows, head_weight, hidden_states
from pippin.engines.jax.lora import scaled
from pippin.engines.jax.loss import Head, chunk_size, head_loss
from pippin.engines.jax.mesh import make_mesh, notice, shardings, split_rows, split_weights
from pippin.engines.jax.optimizer import Adam, Masters, first_masters, update
from pippin.engines.jax.rows import bucket, power_of_two, stack
from pippin.engines.jax.trainable import Trainable
from pippin.recipe import Train


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """What the compiled step is specialised on besides shapes. `full` trains every weight."""

    spec: Spec
    how: How
    adam: Adam
    full: bool
    dtype: str
    mesh: Mesh | None = None


class Frozen(NamedTuple):
    """What is not trained: the weights and the adapters' scales; empty where all is trained."""

    params: Params
    scale_L: Mapping[str, Array]


class JaxTrainer:
    """Trains an adapter, or every weight, of a model that it takes over, from `first` on."""

    def __init__(
        self, first: Any, frozen: Frozen, trainable: Trainable, settings: "Settings"
    ) -> None:
        train = settings.train
        self.train, self.seed = train, settings.seed
        self.shares = False  # one compiled step wants one shape
        mesh = make_mesh(settings.devices, train.batch_rows)
        self.frozen, self.trainable = split_weights(mesh, frozen), trainable
        self.rule = Rule(
            spec=trainable.spec,
            how=How(
                dropout=settings.dropout,
                remat=train.gradient_checkpointing,
                cudnn=has_cudnn(trainable.spec, settings.dtype, settings.devices[0]),
            ),
            adam=Adam.of(train),
            full=trainable.full,
            dtype=settings.dtype,
            mesh=mesh,
        )
        self.masters = split_weights(mesh, first_masters(self.rule.adam, first))
        self.books = Books(trainable.shapes)
        self._ahead: tuple[Sequence[Batch], dict[str, Any]] = ((), {})
        self.notices = settings.notices + (() if mesh is None else (notice(mesh),))

    def step(
        self,
        batches: Sequence[Batch],
        learning_rate: float,
        upcoming: Callable[[], Sequence[Batch]] = tuple,
    ) -> StepResult:
        """One AdamW update over the micro-batches, each scored token weighing the same.

        The next update's arrays are laid out while the device works on this one.
        """
        tokens = scored_tokens(batches)
        arrays = self._ahead[1] if batches is self._ahead[0] else self._arrays(batches)
        key = jax.random.fold_in(jax.random.key(self.seed), self.books.steps)
        figures = np.float32(tokens), np.float32(learning_rate), np.int32(len(batches))
        self.masters, loss, norm, moved = train_step(
            self.rule, self.masters, self.frozen, arrays, key, *figures
        )
        following = upcoming()
        self._ahead = following, self._arrays(following) if following else {}
        result = StepResult(loss_sum=float(loss), tokens=tokens, grad_norm=float(norm))
        if self.books.enter(result):
            self.books.watch(learning_rate, self.trainable.moved(moved).intersection)
        return result

    def loss(self, batch: Batch) -> tuple[float, int]:
        """Summed loss in nats and count of scored tokens; no gradient, dropout off."""
        shape = power_of_two(len(batch.tokens_BT)), bucket(batch.tokens_BT.shape[1])
        arrays = stack([batch], *shape, chunk_size(self.rule.spec))
        part = {name: array[0] for name, array in arrays.items()}
        loss = only_loss(self.rule, self.masters.weights, self.frozen, part)
        return float(loss), batch.scored_tokens

    def weights(self) -> Weights:
        """The trainable tensors in float32 on the host, by checkpoint name."""
        return self.trainable.names(self.masters.weights)

    def state(self) -> Weights:
        """Masters, moments and counters. Random choices follow from seed and step number."""
        adam = self.masters.moments[0]
        parts = self.masters.weights, adam.mu, adam.nu
        return self.books.state([self.trainable.names(tree) for tree in parts])

    def restore(self, state: Weights) -> None:
        """Take up a state that `state` returned."""
        weights, mu, nu = map(self._placed, self.books.restore(state))
        adam, rest = self.masters.moments
        count = np.asarray(self.books.updates, adam.count.dtype)
        adam = adam._replace(mu=mu, nu=nu, count=jax.device_put(count, adam.count.sharding))
        self.masters = Masters(weights, (adam, rest))

    def _placed(self, weights: Weights) -> Any:
        """Stacked like the masters, on their device."""
        trees = self.trainable.tree(weights), self.masters.weights
        return jax.tree.map(lambda a, like: jax.device_put(a, like.sharding), *trees)

    def _arrays(self, batches: Sequence[Batch]) -> dict[str, Any]:
        """Every update of a recipe has one shape: what is missing is filled with empty rows."""
        train = self.train
        rows = max(len(batch.tokens_BT) for batch in batches)
        columns = max(batch.tokens_BT.shape[1] for batch in batches)
        if rows <= train.batch_rows and columns == train.row_tokens:
            rows = train.batch_rows
            if not train.packing:
                longest = max(int((b.segments_BT > 0).sum(1).max()) for b in batches)
                columns = min(columns, bucket(longest))
        else:
            rows, columns = power_of_two(rows), bucket(columns)
        batches = [_cut(batch, columns) for batch in batches]
        arrays = stack(batches, rows, columns, chunk_size(self.rule.spec))
        missing = max(0, train.accumulate - len(batches))
        grown = {n: np.pad(a, ((0, missing), *[(0, 0)] * (a.ndim - 1))) for n, a in arrays.items()}
        return split_rows(self.rule.mesh if rows == train.batch_rows else None, grown)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What a trainer is told besides model and adapter."""

    train: Train
    dropout: float
    seed: int
    dtype: str
    devices: tuple[jax.Device, ...]
    notices: tuple[str, ...] = ()


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def train_step(
    rule: Rule, masters: Masters, frozen: Frozen, arrays: dict[str, Array], *rest: Array
) -> tuple[Masters, Array, Array, Any]:
    """The masters after one update, summed loss, gradient norm, and which tensors moved.

    `arrays` hold M micro-batches, of which the first `count` are real.
    """
    key, tokens, learning_rate, count = rest
    gradient = jax.value_and_grad(partial(_loss, rule))

    def add(number: Array, sums: tuple[Array, Any]) -> tuple[Array, Any]:
        part = {name: array[number] for name, array in arrays.items()}
        drawn = jax.random.fold_in(key, number) if rule.how.dropout else None
        found = gradient(masters.weights, frozen, part, drawn)
        return jax.tree.map(jnp.add, sums, found)

    zeros = jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, masters.weights)
    sums = lax.fori_loop(0, count, add, zeros)
    masters, norm, moved = update(rule.adam, masters, sums, tokens, learning_rate)
    if rule.mesh is not None:
        masters = lax.with_sharding_constraint(masters, shardings(rule.mesh, masters))
    return masters, sums[0], norm, moved


@partial(jax.jit, static_argnums=0)
def only_loss(rule: Rule, weights: Any, frozen: Frozen, part: dict[str, Array]) -> Array:
    """Summed loss of one micro-batch, dropout off."""
    return _loss(rule, weights, frozen, part, None)


def _loss(
    rule: Rule, weights: Any, frozen: Frozen, part: dict[str, Array], key: Array | None
) -> Array:
    net = _net(rule, weights, frozen)
    rows = Rows(part["tokens"], part["positions"], part["segments"])
    hidden_BTD = hidden_states(rule.spec, net, rows, rule.how, key)
    hidden_SD = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])[part["index"]]
    weight_VD = head_weight(net.params)
    head = Head(spec=rule.spec, trained=rule.full)
    return head_loss(head, hidden_SD, weight_VD, part["targets"], part["count"])


def _net(rule: Rule, weights: Any, frozen: Frozen) -> Net:
    """Parameters in the dtype of computation, and the adapter."""
    if rule.full:
        return Net(jax.tree.map(lambda w: w.astype(rule.dtype), weights), {})
    return Net(frozen.params, scaled(weights, frozen.scale_L))


def _cut(batch: Batch, columns: int) -> Batch:
    """Without padding that every row has on its right."""
    names = ("tokens_BT", "positions_BT", "segments_BT", "scored_BT")
    return Batch(**{name: getattr(batch, name)[:, :columns] for name in names})
