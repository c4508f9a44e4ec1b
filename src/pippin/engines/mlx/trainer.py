"""Training: exact packed rows, loss on scored positions, AdamW in float32.

Shape letters: B rows, T tokens, N tokens of all rows, S scored positions, D hidden.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from pippin.data.batches import Batch, without_unread
from pippin.data.beginnings import share_beginnings
from pippin.engines import StepResult, Weights
from pippin.engines.books import Books, scored_tokens, seed_of
from pippin.engines.mlx.attention import packed_attention
from pippin.engines.mlx.body import Head, Loaded, scalar
from pippin.engines.mlx.following import as_arrays
from pippin.engines.mlx.lora import LoraLinear
from pippin.engines.mlx.loss import head_loss, logits_loss, plain_loss
from pippin.engines.mlx.names import Place
from pippin.engines.mlx.optimizer import Arrays, Optimizer, Sums
from pippin.engines.mlx.probe import find_ability, run_rows
from pippin.engines.mlx.recompute import recompute_layers
from pippin.engines.mlx.ring import find_ring
from pippin.engines.mlx.rows import Rows, cut
from pippin.errors import ModelError
from pippin.recipe import Train

BUSY = 256  # tokens


class MlxTrainer:
    """Trains `places`, by checkpoint name, of a network that it takes over.

    `notices` tells what was replaced by something slower. Raises ModelError where samples cannot
    share a row exactly and `train.packing` asks for it.
    """

    def __init__(self, loaded: Loaded, places: dict[str, Place], train: Train, seed: int) -> None:
        self.loaded, self.network, self.places = loaded, loaded.network, places
        self.train, self.seed = train, seed
        self.ability = find_ability(self.network)
        self.head_trained = _holds(loaded.head, places.values())
        # With a trained bias, or an adapter of its own, the head is no plain product.
        plain = not self.head_trained or (loaded.head and loaded.head.weight is not None)
        self.head = loaded.head if plain and not _adapted(loaded.head, places.values()) else None
        self.ring = find_ring()
        self._ahead: list[tuple[Batch, list[Rows]]] = []
        self.notices = self._notices()
        self._refuse()
        if train.gradient_checkpointing:
            recompute_layers(self.network)
        self.drops = [m for m in self.network.modules() if isinstance(m, LoraLinear) and m.drops]
        self.shares = self.ability.shares and not self.drops
        self.dtypes = {name: place.get().dtype for name, place in places.items()}
        first = {name: place.get().astype(mx.float32) for name, place in places.items()}
        self.optimizer = Optimizer(first, train)
        self.books = Books({name: array.shape for name, array in first.items()})
        self.grad = mx.value_and_grad(self._loss)

    def step(
        self,
        batches: Sequence[Batch],
        learning_rate: float,
        upcoming: Callable[[], Sequence[Batch]] = tuple,
    ) -> StepResult:
        """One AdamW update over the micro-batches, each scored token weighing the same.

        While a GPU works alone, the next update's batches are laid out.
        """
        if self.ring is None:
            return self._step(batches, learning_rate, upcoming)
        with self.ring.told("step", {"learning_rate": learning_rate}, as_arrays(batches)):
            return self._step(batches, learning_rate, tuple)

    def _step(
        self,
        batches: Sequence[Batch],
        learning_rate: float,
        upcoming: Callable[[], Sequence[Batch]],
    ) -> StepResult:
        before = {name: self.optimizer.masters[name] for name in self.books.unmoved}
        sums = self._sums(batches)
        loss, norm = self.optimizer.update(sums, learning_rate, self.books.updates + 1)
        if mx.default_device() != mx.cpu:
            self._ahead = [(batch, self._laid_out(batch)) for batch in upcoming()]
        result = StepResult(loss_sum=scalar(loss), tokens=sums.tokens, grad_norm=scalar(norm))
        if self.books.enter(result):
            self.books.watch(learning_rate, partial(_moved, before, self.optimizer.masters))
        return result

    def _sums(self, batches: Sequence[Batch]) -> Sums:
        """One part after the other is computed; the last is left to the update."""
        parts = [part for batch in batches for part in self._laid_out(batch)]
        zeros = mx.array(0.0), {n: mx.zeros_like(a) for n, a in self.optimizer.masters.items()}
        sums: Any = zeros
        work = list(zip(self._keys(len(parts)), parts, strict=True))
        for key, rows in self.ring.share(work) if self.ring else work:
            if sums is not zeros:
                mx.eval(sums)
            self._draw_from(key)
            with self._recomputing():
                found = self.grad(self.optimizer.masters, rows)
            sums = found if sums is zeros else tree_map(mx.add, sums, found)
        if self.ring:
            loss, *grads = self.ring.added_up([sums[0], *sums[1].values()])
            sums = loss, dict(zip(sums[1], grads, strict=True))
        return Sums(loss=sums[0], grads=sums[1], tokens=scored_tokens(batches))

    def _recomputing(self) -> contextlib.AbstractContextManager[None]:
        """What is recomputed runs after the forward, and needs its attention."""
        checkpoints = self.train.gradient_checkpointing
        return packed_attention(self.network) if checkpoints else contextlib.nullcontext()

    def _laid_out(self, batch: Batch) -> list[Rows]:
        held = (parts for ahead, parts in self._ahead if ahead is batch)
        return next(held, None) or self._parts(batch, shares=self.shares)

    def _parts(self, batch: Batch, *, shares: bool) -> list[Rows]:
        """Without what no loss reads; where it `shares`, a beginning stands once a part.

        On a CPU, where more tokens at a time are no faster, a part has as few as keep it busy.
        """
        if self.ability.packs:
            batch = without_unread(batch)
        if shares:
            batch = share_beginnings(batch)
        parts = [batch]
        if self.ability.packs and mx.default_device() == mx.cpu:
            parts = cut(batch, BUSY)
        elif self.ability.packs and self.ring:
            parts = cut(batch, -(-batch.real_tokens // self.ring.size))
        return [self._rows(part) for part in parts]

    def loss(self, batch: Batch) -> tuple[float, int]:
        """Summed loss in nats and count of scored tokens; no gradient, dropout off."""
        self._draw_from(None)
        self._put(self.optimizer.masters)
        losses = [self._plain_loss(rows) for rows in self._parts(batch, shares=self.ability.shares)]
        return sum(losses), batch.scored_tokens

    def weights(self) -> Weights:
        """The trainable tensors in float32 on the host, by checkpoint name."""
        return self.optimizer.parts()[0]

    def state(self) -> Weights:
        """Masters, moments and counters. Random choices follow from seed and step number."""
        return self.books.state(self.optimizer.parts())

    def restore(self, state: Weights) -> None:
        """Take up a state that `state` returned."""
        told = self.ring.told("restore", {}, state) if self.ring else contextlib.nullcontext()
        with told:
            self.optimizer.restore(self.books.restore(state))

    def _loss(self, masters: Arrays, rows: Rows) -> mx.array:
        self._put(masters)
        if self.head is None:
            return self._loss_of_forward(rows)
        hidden_SD = self._hidden(rows)
        return head_loss(hidden_SD, rows.targets_S, self.head, head_trained=self.head_trained)

    def _plain_loss(self, rows: Rows) -> float:
        if self.head is None:
            return scalar(self._loss_of_forward(rows))
        return plain_loss(self._hidden(rows), rows.targets_S, self.head)

    def _rows(self, batch: Batch) -> Rows:
        self.loaded.refuse_long(int(batch.positions_BT.max()) + 1)
        return self.ability.layout(batch)

    def _put(self, masters: Arrays) -> None:
        for name, place in self.places.items():
            place.put(masters[name].astype(self.dtypes[name]))

    def _hidden(self, rows: Rows) -> mx.array:
        hidden_BTD = run_rows(self.network, rows)
        return hidden_BTD.flatten(0, 1)[rows.index_S]

    def _loss_of_forward(self, rows: Rows) -> mx.array:
        """The model's own logits, for a head that is not a plain product."""
        logits_NV = run_rows(self.network, rows, whole=True).flatten(0, 1)
        return logits_loss(logits_NV[rows.index_S], rows.targets_S)

    def _keys(self, count: int) -> list[Any]:
        """Sources of dropout, a function of seed and step: a state needs none of them."""
        if not self.drops:
            return [None] * count
        key = mx.random.key(seed_of(self.seed, self.books.steps))
        return list(mx.random.split(key, count))

    def _draw_from(self, key: mx.array | None) -> None:
        keys = [None] * len(self.drops) if key is None else mx.random.split(key, len(self.drops))
        for layer, own in zip(self.drops, keys, strict=True):
            layer.draw_from(own)

    def _refuse(self) -> None:
        if self.train.packing and not self.ability.packs:
            raise ModelError(
                f"mlx-lm's {type(self.network).__module__} cannot keep packed samples apart",
                "set train.packing = false",
            )
        if self.train.frozen_dtype != "auto":
            raise ModelError(
                f"train.frozen_dtype = {self.train.frozen_dtype} does not exist in MLX",
                "leave it out, or start from a quantized model",
            )

    def _notices(self) -> tuple[str, ...]:
        notices = [*self.loaded.notices]
        if self.ability.notice:
            notices.append(self.ability.notice)
        if self.head is None:
            notices.append("the head is the model's own; its full logits are computed")
        if self.ring:
            notices.append(f"updates are shared by {self.ring.size} processes in a ring")
        return tuple(notices)


def _holds(head: Head | None, places: Iterable[Place]) -> bool:
    return head is not None and any(place.module is head.module for place in places)


def _adapted(head: Head | None, places: Iterable[Place]) -> bool:
    return head is not None and any(place.module.get("base") is head.module for place in places)


def _moved(before: Arrays, after: Arrays, names: Collection[str]) -> set[str]:
    return {name for name in names if not bool(mx.array_equal(before[name], after[name]))}
